//! The short ways of the scripts, beside the general script: each does the same, and each of its checks is needed for that.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkit_testbed::redis::RedisServer;

use crate::common::no_server;

const LOCK: &str = "lockkit:a";
const QUEUE: &str = "lockkit:lockkit#queue:{lockkit:a}";
const ENTRIES: &str = "lockkit:lockkit#about:{lockkit:a}";
const HOLDERS: &str = "lockkit:lockkit#holders:{lockkit:a}";

/// The clients of these owners listen. Those of others do not.
const LISTENING: [char; 2] = ['a', 'b'];

/// Every length of time here is a multiple of a second, up to less than a half.
const PROMPT: Duration = Duration::from_millis(300);

/// One command, as its words.
type Command = Vec<String>;

/// A part of the source of a script.
macro_rules! part {
    ($name:literal) => {
        include_str!(concat!("../../src/lua/", $name, ".lua"))
    };
}

/// A script with a short way.
struct Script {
    before: Vec<&'static str>,
    short_way: &'static str,
    after: Vec<&'static str>,
}

impl Script {
    fn acquire() -> Self {
        Self {
            before: vec![
                part!("head"),
                part!("read_key"),
                part!("draw_tokens"),
                part!("acquire_fast"),
                part!("layout"),
            ],
            short_way: part!("queue_up"),
            after: vec![part!("common"), part!("acquire")],
        }
    }

    fn release() -> Self {
        Self {
            before: vec![
                part!("head"),
                part!("read_key"),
                part!("release_fast"),
                part!("draw_tokens"),
                part!("layout"),
            ],
            short_way: part!("hand_over"),
            after: vec![part!("common"), part!("release")],
        }
    }

    fn with(&self, short_way: &str) -> String {
        let parts = self.before.iter().chain([&short_way]).chain(&self.after);
        parts.copied().collect()
    }

    /// Of the short way, there are only the names that the general script uses.
    fn general(&self) -> String {
        let lines = self.short_way.lines();
        let names = lines.filter(|line| line.starts_with("local me ") || line.starts_with("local record "));
        let names: Vec<_> = names.collect();
        self.with(&(names.join("\n") + "\n"))
    }

    /// Breaks the short way in one place.
    fn broken(&self, from: &str, to: &str) -> String {
        assert_eq!(self.short_way.matches(from).count(), 1, "{from}");
        self.with(&self.short_way.replace(from, to))
    }
}

/// A state of the lock, and a request.
struct Situation {
    what: &'static str,
    state: Vec<Command>,
    arguments: Vec<String>,
}

impl Situation {
    /// Somebody releases.
    fn release(what: &'static str, owner: char, state: &[Vec<Command>]) -> Self {
        Self {
            what,
            state: state.concat(),
            arguments: vec![format!("lockkit:{}", record(owner, "1000"))],
        }
    }

    /// Somebody asks for the lock: in this mode, for so many ms, to wait or to try.
    fn acquire(what: &'static str, (owner, mode, ttl, how): Asks, state: &[Vec<Command>]) -> Self {
        let value = format!("lockkit:{}", record(owner, "%d"));
        let arguments = [&*value, "1", ttl, mode, "33", how];
        Self {
            what,
            state: state.concat(),
            arguments: arguments.map(str::to_owned).into(),
        }
    }
}

type Asks = (char, &'static str, &'static str, &'static str);

fn command(words: &[&str]) -> Command {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn id(owner: char) -> String {
    owner.to_string().repeat(32)
}

fn client(owner: char) -> String {
    format!("lockkit:lockkit#client:{owner}t")
}

fn record(owner: char, token: &str) -> String {
    format!("{} 1 {token} {} label", id(owner), client(owner))
}

/// The key lasts for so many ms. After `+`, the last ten seconds of them are no lease.
fn held(owner: char, flag: char, ms: u32) -> Vec<Command> {
    let value = format!("lockkit{flag}{}", record(owner, "1000"));
    vec![command(&["SET", LOCK, &value, "PX", &ms.to_string()])]
}

/// Somebody waits who came so many seconds from now.
fn waits_since(owner: char, seconds: i64, mode: &str, ttl: u32) -> Vec<Command> {
    let entry = format!("{mode} {ttl} {}", record(owner, "%d"));
    vec![
        command(&["ZADD", QUEUE, &format!("now{seconds:+}"), &id(owner)]),
        command(&["HSET", ENTRIES, &id(owner), &entry]),
        command(&["PEXPIRE", QUEUE, "600000"]),
        command(&["PEXPIRE", ENTRIES, "600000"]),
    ]
}

/// Puts the time in µs in the place of `now-4`.
fn by_the_clock(word: &str) -> String {
    let seconds = word.strip_prefix("now").and_then(|word| word.parse::<i64>().ok());
    let Some(seconds) = seconds else {
        return word.to_owned();
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_micros()).unwrap();
    (now + seconds * 1_000_000).to_string()
}

/// Waits exclusively. `place` is that among those who wait.
fn waits(owner: char, place: i64) -> Vec<Command> {
    waits_since(owner, place - 5, "x", 30_000)
}

fn releases() -> Vec<Situation> {
    let held = || held('a', '+', 40_000);
    let of = Situation::release;
    vec![
        of("to one who waits", 'a', &[held(), waits('b', 1)]),
        of(
            "to the first of two",
            'a',
            &[held(), waits('b', 1), waits('c', 2)],
        ),
        of("of what another holds", 'e', &[held(), waits('b', 1)]),
        of(
            "after the end of the lease",
            'a',
            &[self::held('a', '+', 5_000), waits('b', 1)],
        ),
        of("with its own place first", 'a', &[held(), waits('a', 1)]),
        of(
            "with its own place second",
            'a',
            &[held(), waits('b', 1), waits('a', 2)],
        ),
        of(
            "with its own place third",
            'a',
            &[held(), waits('b', 1), waits('c', 2), waits('a', 3)],
        ),
        of(
            "where the second has died",
            'a',
            &[
                held(),
                waits_since('b', -3_600, "x", 30_000),
                waits_since('c', -3_000, "x", 30_000),
                vec![command(&["SET", &client('b'), "1"])],
            ],
        ),
        of(
            "to a short lease",
            'a',
            &[held(), waits_since('b', -2, "x", 1_000), waits('c', 4)],
        ),
        of(
            "to one who shares",
            'a',
            &[held(), waits_since('b', -2, "s", 30_000)],
        ),
        of("to one who is not connected", 'a', &[held(), waits('d', 1)]),
        of(
            "past one who is not connected",
            'a',
            &[held(), waits('d', 1), waits('b', 2)],
        ),
    ]
}

fn requests() -> Vec<Situation> {
    let waited_for = || held('a', '+', 40_000);
    let over = || held('a', '+', 5_000);
    let of = Situation::acquire;
    let wait = ('c', "x", "30000", "wait");
    let try_it = ('c', "x", "30000", "try");
    vec![
        of("by the first to wait", wait, &[held('a', ':', 30_000)]),
        of("by the second to wait", wait, &[waited_for(), waits('b', 1)]),
        of(
            "again",
            ('b', "x", "20000", "wait"),
            &[waited_for(), waits('b', 1)],
        ),
        of(
            "again, with another behind",
            ('b', "x", "30000", "wait"),
            &[waited_for(), waits('b', 1), waits('d', 2)],
        ),
        of(
            "by the holder",
            ('a', "x", "30000", "wait"),
            &[held('a', ':', 30_000)],
        ),
        of("after the end of the lease", wait, &[over(), waits('b', 1)]),
        of(
            "where the key does not say that one waits",
            wait,
            &[held('a', ':', 30_000), waits('b', 1)],
        ),
        of(
            "to share, by one who did",
            ('c', "s", "30000", "wait"),
            &[
                held('a', ':', 30_000),
                vec![command(&["ZADD", HOLDERS, "1000", &id('c')])],
            ],
        ),
        of(
            "after the clock was set back",
            wait,
            &[waited_for(), waits_since('b', 3_600, "x", 30_000)],
        ),
        of("by a try", try_it, &[waited_for(), waits('b', 1)]),
        of(
            "by a try after the end of the lease",
            try_it,
            &[over(), waits('b', 1)],
        ),
    ]
}

/// Rounds what is in ms to seconds, and leaves out what depends on the clock.
fn rounded(text: &str) -> String {
    let lines = text.lines().map(|line| match line.parse::<i64>() {
        Ok(later) if later > 1_000_000_000_000 => "later".to_owned(),
        Ok(ms) if ms.abs() > 1_000 => format!("{} s", (ms + 500).div_euclid(1_000)),
        _ => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join(", ")
}

/// Leaves out the tokens, which are numbers of 13 digits and more.
fn without_tokens(text: &str) -> String {
    let is_none = |word: &&str| word.len() < 13 || !word.bytes().all(|byte| byte.is_ascii_digit());
    text.split(' ').filter(is_none).collect::<Vec<_>>().join(" ")
}

/// Returns the reply to the request in this situation, and all that is there afterwards.
fn outcome(server: &RedisServer, script: &str, situation: &Situation) -> String {
    let run = |words: &[&str]| server.cli(words).unwrap_or_else(|error| error.to_string());
    for _ in 0..50 {
        let began = Instant::now();
        run(&["FLUSHALL"]);
        for command in &situation.state {
            let words: Vec<_> = command.iter().map(|word| by_the_clock(word)).collect();
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            run(&words);
        }
        let mut request = vec!["EVAL", script, "1", LOCK];
        request.extend(situation.arguments.iter().map(String::as_str));
        let reply = rounded(&run(&request));
        let entries = run(&["HGETALL", ENTRIES]);
        let entries: Vec<_> = entries.lines().collect();
        let mut entries: Vec<_> = entries.chunks(2).map(|entry| entry.join(" ")).collect();
        entries.sort_unstable();
        let lasting = [LOCK, QUEUE, ENTRIES, HOLDERS].map(|key| rounded(&run(&["PTTL", key])));
        let there = format!(
            "reply {reply}; lock {}; queue {}; holders {}; entries {}; for {}",
            without_tokens(&run(&["GET", LOCK])),
            run(&["ZRANGE", QUEUE, "0", "-1"]).replace('\n', " "),
            run(&["ZRANGE", HOLDERS, "0", "-1"]).replace('\n', " "),
            without_tokens(&entries.join(", ")),
            lasting.join(", ")
        );
        // Else the machine stood still, and times would be rounded to another second.
        if began.elapsed() < PROMPT {
            return there;
        }
    }
    panic!("{}: the machine is too slow", situation.what)
}

/// Checks that the short way does what the general script does in each situation, and that it does not with any of these changes.
fn check(script: &Script, situations: &[Situation], breaks: &[(&str, &str)]) {
    let server = RedisServer::plain().unwrap();
    let listener = redis::Client::open(server.url()).unwrap();
    let mut listener = listener.get_connection().unwrap();
    let mut listener = listener.as_pubsub();
    for owner in LISTENING {
        listener.subscribe(client(owner)).unwrap();
    }
    let general = script.general();
    let whole = script.with(script.short_way);
    let expected: Vec<_> = situations
        .iter()
        .map(|situation| outcome(&server, &general, situation))
        .collect();
    // Redis 6.0 refuses a SET that returns what was there.
    let of_redis_6 = whole.replace("micros + tokens), 'GET')", "micros + tokens), 'GOT')");
    assert_ne!(of_redis_6, whole);
    for script in [&whole, &of_redis_6] {
        for (situation, expected) in situations.iter().zip(&expected) {
            let found = outcome(&server, script, situation);
            assert_eq!(&found, expected, "{}", situation.what);
        }
    }
    let mut unseen = Vec::new();
    for (from, to) in breaks {
        let broken = script.broken(from, to);
        let mut all = situations.iter().zip(&expected);
        let seen = all.find(|(situation, expected)| outcome(&server, &broken, situation) != **expected);
        match seen {
            Some((situation, _)) => eprintln!("{from} -> {to}: seen {}", situation.what),
            None => unseen.push(from),
        }
    }
    assert!(
        unseen.is_empty(),
        "no situation shows what these are for: {unseen:#?}"
    );
}

#[test]
fn a_release_to_the_head_is_what_the_general_one_does() {
    if no_server() {
        return;
    }
    let breaks = [
        ("== 'lockkit+' .. me .. ' '", "~= ''"),
        ("fits = lease > 0 and head", "fits = head"),
        (" and head ~= me", ""),
        (" and second ~= me", ""),
        ("(not second or micros - waiters[4] < ALIVE_FOR * 1000)", "true"),
        ("ttl and tonumber(ttl) >= HANDOFF_TTL", "ttl ~= nil"),
        ("'^x (%d+)", "'^%a (%d+)"),
        ("type(receivers) == 'number' and receivers > 0", "true"),
        ("call('ZADD', QUEUE, waiters[2], head)", ""),
        ("if not second then call('PEXPIRE', QUEUE, IDLE) end", ""),
        ("call('ZREM', QUEUE, head, me)", "call('ZREM', QUEUE, head)"),
        ("HANDOFF_TTL + (second and GRACE or 0)", "HANDOFF_TTL"),
        ("(second and 'lockkit+' or 'lockkit:')", "'lockkit:'"),
        ("return call('HDEL', ENTRIES, head)", "return 1"),
    ];
    check(&Script::release(), &releases(), &breaks);
}

#[test]
fn to_queue_up_is_what_the_general_script_does() {
    if no_server() {
        return;
    }
    let breaks = [
        ("if holder and holder ~= me then", "if holder then"),
        (
            "call('PTTL', LOCK) - (waited_for and GRACE or 0)",
            "call('PTTL', LOCK)",
        ),
        ("if ARGV[6] == 'try' and lease > 0 then", "if false then"),
        (
            "if ARGV[6] == 'try' and lease > 0 then",
            "if ARGV[6] == 'try' then",
        ),
        ("fits = lease > 0 and waited_for", "fits = waited_for"),
        ("waited_for == (last ~= nil) and ", ""),
        (" and (ARGV[4] == 'x' or call('EXISTS', HOLDERS) == 0)", ""),
        ("math.max((last or 0) + 1, micros)", "micros"),
        ("'NX', string.format", "string.format"),
        ("me) == 1 then", "me) >= 0 then"),
        (
            "call('HSET', ENTRIES, me, ARGV[4] .. ' ' .. ARGV[3] .. ' ' .. record)",
            "",
        ),
        ("call('PEXPIRE', QUEUE, IDLE)", ""),
        ("call('PEXPIRE', ENTRIES, IDLE)", ""),
        ("'PX', lease + GRACE", "'PX', lease"),
        (
            "call('SET', LOCK, 'lockkit+' .. string.sub(value, 9), 'PX', lease + GRACE)",
            "",
        ),
        ("call('ZCARD', QUEUE) - 1", "0"),
    ];
    check(&Script::acquire(), &requests(), &breaks);
}
