//! Compares the simulated master with a real one that runs the scripts: same requests, same replies, same state.

use std::{fmt::Write as _, fs, ops::RangeInclusive, path::Path};

use fastrand::Rng;
use lockkit_testbed::redis::RedisServer;
use redis::{Connection, Value, cmd};

use super::*;

const LOCK: &str = "lockkit:differential";
const MARKER: &str = "lockkit:lockkit#redlock";
/// Longer than the test takes.
const TTL: Micros = 600_000_000;
const OWNERS: u32 = 3;

/// The texts of the scripts.
struct Scripts {
    vote: String,
    confirm: String,
    renew: String,
    release: String,
}

impl Scripts {
    fn read() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/lua");
        let part = |name: &str| {
            let path = folder.join(format!("{name}.lua"));
            fs::read_to_string(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
        };
        let script = |parts: &[&str]| {
            parts.iter().fold(part("head"), |mut text, name| {
                let _ = writeln!(text, "{}", part(&format!("redlock_{name}")));
                text
            })
        };
        Self {
            vote: script(&[
                "head",
                "tokens",
                "vote_fast",
                "layout",
                "vote_taken",
                "common",
                "vote",
            ]),
            confirm: script(&["head", "tokens", "confirm"]),
            renew: script(&["head", "tokens", "renew_fast", "layout", "common", "renew"]),
            release: script(&[
                "head",
                "release_fast",
                "layout",
                "release_next",
                "common",
                "release",
            ]),
        }
    }
}

/// The driver's view of an owner's last round at this master.
#[derive(Clone)]
struct Owner {
    claim: Claim,
    mode: Mode,
    tokens: RangeInclusive<u64>,
    /// The tokens that it proposed for confirmation in this round.
    confirming: Option<RangeInclusive<u64>>,
}

impl Owner {
    fn value(&self, tokens: &RangeInclusive<u64>) -> String {
        format!("lockkit:{:032x} 4 {} client ", self.claim.owner, tokens.start())
    }

    /// Returns the lock's value and tokens at the masters, as far as the owner knows.
    fn known(&self) -> (String, RangeInclusive<u64>) {
        let tokens = self.confirming.as_ref().unwrap_or(&self.tokens).clone();
        (self.value(&tokens), tokens)
    }

    fn bid(&self, tokens: RangeInclusive<u64>) -> Bid {
        Bid {
            claim: self.claim,
            mode: self.mode,
            ttl: TTL,
            tokens,
        }
    }
}

struct Both {
    scripts: Scripts,
    connection: Connection,
    real_life: String,
    simulated: Master,
    trail: String,
}

impl Both {
    fn eval(&mut self, script: fn(&Scripts) -> &String, args: &[String]) -> Value {
        let script = script(&self.scripts);
        let mut eval = cmd("EVAL");
        eval.arg(script).arg(1).arg(LOCK).arg(args);
        eval.query(&mut self.connection).expect("an answer")
    }

    /// Asks the real master to vote on these tokens, to renew or to repair. A repair only has to raise the counter to the last
    /// of them.
    fn ask_real(
        &mut self,
        owner: &Owner,
        tokens: &RangeInclusive<u64>,
        repairs: bool,
        script: fn(&Scripts) -> &String,
    ) -> Value {
        let first = if repairs { tokens.end() } else { tokens.start() };
        let args = [
            self.marked(),
            owner.value(tokens),
            (TTL / 1000).to_string(),
            first.to_string(),
            tokens.end().to_string(),
            letter(owner.mode).to_owned(),
            "1".to_owned(),
            if repairs { "repair" } else { "try" }.to_owned(),
        ];
        self.eval(script, &args)
    }

    fn vote(&mut self, owner: &Owner) -> (Answer, Answer) {
        let request = Request::Vote(owner.bid(owner.tokens.clone()));
        let real = vote_in(&self.ask_real(owner, &owner.tokens, false, |scripts| &scripts.vote));
        let simulated = match self.simulated.answer(0, &request) {
            Answer::Vote(Vote::Taken(_)) => Answer::Vote(Vote::Taken(None)),
            answer => answer,
        };
        (simulated, Answer::Vote(real))
    }

    fn confirm(&mut self, owner: &Owner, tokens: &RangeInclusive<u64>) -> (Answer, Answer) {
        let request = Request::Confirm {
            claim: owner.claim,
            tokens: tokens.clone(),
        };
        let args = [
            self.marked(),
            owner.value(&owner.tokens),
            owner.value(tokens),
            tokens.start().to_string(),
            tokens.end().to_string(),
            letter(owner.mode).to_owned(),
        ];
        let real = match self.eval(|scripts| &scripts.confirm, &args) {
            Value::Int(1) => Confirmation::Raised,
            value => Confirmation::Refused(number(&value)),
        };
        (self.simulated.answer(0, &request), Answer::Confirmation(real))
    }

    fn renew(&mut self, owner: &Owner) -> (Answer, Answer) {
        let (_, tokens) = owner.known();
        let request = Request::Renew(owner.bid(tokens.clone()));
        let real = match self.ask_real(owner, &tokens, false, |scripts| &scripts.renew) {
            Value::Int(1) => Report::Held,
            Value::Int(0) => Report::Free,
            Value::Int(2) => Report::Other,
            Value::Int(3) => Report::Abstains,
            value => panic!("{value:?}"),
        };
        (self.simulated.answer(0, &request), Answer::Report(real))
    }

    fn repair(&mut self, owner: &Owner) -> (Answer, Answer) {
        let (_, tokens) = owner.known();
        let request = Request::Repair(owner.bid(tokens.clone()));
        let real = match vote_in(&self.ask_real(owner, &tokens, true, |scripts| &scripts.vote)) {
            Vote::Granted | Vote::Behind(_) => Report::Held,
            Vote::Abstains => Report::Abstains,
            _ => Report::Other,
        };
        (self.simulated.answer(0, &request), Answer::Report(real))
    }

    /// Compares whether the lock was held, which is all that the real master reports.
    fn release(&mut self, owner: &Owner) -> (Answer, Answer) {
        let (value, _) = owner.known();
        let real = match self.eval(|scripts| &scripts.release, &[value, "yield".to_owned()]) {
            Value::Int(0) => Report::Free,
            Value::Int(_) => Report::Held,
            value => panic!("{value:?}"),
        };
        let request = Request::Release { claim: owner.claim };
        let simulated = match self.simulated.answer(0, &request) {
            Answer::Report(Report::Other) => Answer::Report(Report::Free),
            answer => answer,
        };
        (simulated, Answer::Report(real))
    }

    /// Deletes the key, as its expiry does.
    fn delete(&mut self) {
        let _: () = cmd("DEL")
            .arg(LOCK)
            .query(&mut self.connection)
            .expect("an answer");
        self.simulated.delete();
    }

    /// Ends one reader's lease. The scripts forget it when they next look at the holders, which a confirmation does not.
    fn end_share(&mut self, owner: &Owner) {
        let holders = format!("lockkit:lockkit#holders:{{{LOCK}}}");
        let mut end = cmd("ZADD");
        end.arg(holders)
            .arg("XX")
            .arg(1)
            .arg(format!("{:032x}", owner.claim.owner));
        let _: () = end.query(&mut self.connection).expect("an answer");
        let nobody = format!("lockkit:{:032x} 4 1 client ", 0);
        self.eval(|scripts| &scripts.release, &[nobody, "yield".to_owned()]);
        let its = |holder: &Holder| holder.claim.owner == owner.claim.owner && holder.mode == Mode::Shared;
        self.simulated.data.holders.retain(|holder| !its(holder));
    }

    /// Returns the marker with which the real master has a vote.
    fn marker(&self) -> String {
        format!("{} {}", self.real_life, TTL / 1000)
    }

    /// Returns the same with its key, as the scripts want it.
    fn marked(&self) -> String {
        format!("{MARKER} {}", self.marker())
    }

    /// Marks both masters as having all their data, or as having perhaps lost some.
    fn mark(&mut self, whole: bool) {
        let marker = if whole {
            self.marker()
        } else {
            "before 1".to_owned()
        };
        let mut mark = cmd("SET");
        mark.arg(MARKER).arg(marker);
        let _: () = mark.query(&mut self.connection).expect("an answer");
        self.simulated.data.marker = Some(Marker::Votes(if whole { self.simulated.life } else { 0 }));
    }

    /// Returns the holders and the counter of both masters.
    fn states(&mut self) -> [(Vec<u32>, u64); 2] {
        let mut get = |key: String| -> Option<String> {
            cmd("GET")
                .arg(key)
                .query(&mut self.connection)
                .expect("an answer")
        };
        let fence = get(format!("lockkit:lockkit#fence:{{{LOCK}}}"));
        let fence = fence.map_or(0, |fence| fence.parse().expect("a number"));
        let value = get(LOCK.to_owned());
        let mut owners: Vec<String> = match value.as_deref() {
            None => Vec::new(),
            Some("lockkit#shared") => {
                let mut live = cmd("ZRANGEBYSCORE");
                live.arg(format!("lockkit:lockkit#holders:{{{LOCK}}}"))
                    .arg(2)
                    .arg("+inf");
                live.query(&mut self.connection).expect("an answer")
            }
            Some(value) => vec![value[8..40].to_owned()],
        };
        owners.sort();
        let number = |owner: String| u32::from_str_radix(&owner, 16).expect("an owner");
        let real = owners.into_iter().map(number).collect();
        let holders = self.simulated.data.holders.iter();
        let mut simulated: Vec<u32> = holders.map(|holder| holder.claim.owner).collect();
        simulated.sort_unstable();
        [(simulated, self.simulated.data.fence), (real, fence)]
    }
}

fn letter(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "x",
        Mode::Shared => "s",
    }
}

fn number(value: &Value) -> u64 {
    let text: String = redis::from_redis_value(value.clone()).expect("a text");
    text.parse().expect("a number")
}

fn vote_in(value: &Value) -> Vote {
    match value {
        Value::Int(1) => Vote::Granted,
        Value::Int(0) => Vote::Abstains,
        Value::Array(_) => Vote::Taken(None),
        value => Vote::Behind(number(value)),
    }
}

#[test]
fn a_simulated_master_does_what_a_real_one_does() {
    if let Some(why) = lockkit_testbed::redis::missing() {
        panic!("{why}");
    }
    let server = RedisServer::plain().expect("a server");
    let client = redis::Client::open(server.url()).expect("a client");
    let mut both = Both {
        scripts: Scripts::read(),
        connection: client.get_connection().expect("a connection"),
        real_life: "0123456789abcdef0123456789abcdef01234567".to_owned(),
        simulated: Master::default(),
        trail: String::new(),
    };
    let mut kinds = [0; 10];
    for seed in 0..400 {
        compare(&mut both, seed, &mut kinds);
    }
    // Each kind of reply came up often.
    assert!(kinds.iter().all(|times| *times > 200), "{kinds:?}");
}

fn compare(both: &mut Both, seed: u64, kinds: &mut [u32; 10]) {
    let mut rng = Rng::with_seed(seed);
    let _: () = cmd("FLUSHALL").query(&mut both.connection).expect("an answer");
    both.simulated = Master {
        life: 1,
        quarantines: true,
        ..Master::default()
    };
    both.trail = String::new();
    both.mark(true);
    let mut owners: Vec<Owner> = (1..=OWNERS)
        .map(|owner| Owner {
            claim: Claim { owner, round: 0 },
            mode: if rng.bool() { Mode::Exclusive } else { Mode::Shared },
            tokens: 1..=1,
            confirming: None,
        })
        .collect();
    let mut highest = 0;
    for _ in 0..60 {
        let index = rng.usize(..owners.len());
        let owner = &mut owners[index];
        let near = |rng: &mut Rng, above: u64| {
            let first = (above + rng.u64(..8)).saturating_sub(4).max(1);
            first..=first + rng.u64(..3)
        };
        let (simulated, real) = match rng.u8(..20) {
            0..=6 => {
                owner.claim.round += 1;
                // A client's proposals rise, whatever the others' do.
                let tokens = near(&mut rng, highest);
                let first = *tokens.start().max(&(owner.known().1.end() + 1));
                owner.tokens = first..=first + (tokens.end() - tokens.start());
                owner.confirming = None;
                highest = highest.max(*owner.tokens.end());
                let owner = owner.clone();
                let _ = writeln!(
                    both.trail,
                    "vote {:?} {:?} {:?}",
                    owner.claim, owner.mode, owner.tokens
                );
                both.vote(&owner)
            }
            7..=10 if owner.claim.round > 0 => {
                let length = owner.tokens.end() - owner.tokens.start();
                let tokens = owner.confirming.clone().unwrap_or_else(|| {
                    let first = (owner.tokens.end() + 1).max(highest.saturating_sub(2) + rng.u64(..4));
                    first..=first + length
                });
                owner.confirming = Some(tokens.clone());
                highest = highest.max(*tokens.end());
                let owner = owner.clone();
                let _ = writeln!(both.trail, "confirm {:?} {tokens:?}", owner.claim);
                both.confirm(&owner, &tokens)
            }
            11..=13 if owner.claim.round > 0 => {
                let owner = owner.clone();
                let _ = writeln!(both.trail, "renew {:?} {:?}", owner.claim, owner.known());
                both.renew(&owner)
            }
            14 if owner.claim.round > 0 => {
                let owner = owner.clone();
                let _ = writeln!(both.trail, "repair {:?} {:?}", owner.claim, owner.known());
                both.repair(&owner)
            }
            15 | 16 if owner.claim.round > 0 => {
                let owner = owner.clone();
                let _ = writeln!(both.trail, "release {:?}", owner.claim);
                both.release(&owner)
            }
            17 => {
                let _ = writeln!(both.trail, "delete");
                both.delete();
                continue;
            }
            18 => {
                let owner = owner.clone();
                let _ = writeln!(both.trail, "end of the share of {:?}", owner.claim);
                both.end_share(&owner);
                continue;
            }
            _ => {
                let whole = rng.u8(..3) > 0;
                let _ = writeln!(both.trail, "whole: {whole}");
                both.mark(whole);
                continue;
            }
        };
        let _ = writeln!(both.trail, "    {simulated:?}");
        assert_eq!(simulated, real, "seed {seed}, after\n{}", both.trail);
        let [simulated_state, real_state] = both.states();
        assert_eq!(simulated_state, real_state, "seed {seed}, after\n{}", both.trail);
        kinds[kind(simulated)] += 1;
    }
}

fn kind(answer: Answer) -> usize {
    match answer {
        Answer::Vote(Vote::Granted) => 0,
        Answer::Vote(Vote::Behind(_)) => 1,
        Answer::Vote(Vote::Taken(_)) => 2,
        Answer::Vote(Vote::Abstains) => 3,
        Answer::Vote(Vote::Silent) => unreachable!("it answered"),
        Answer::Confirmation(Confirmation::Raised) => 4,
        Answer::Confirmation(_) => 5,
        Answer::Report(Report::Held) => 6,
        Answer::Report(Report::Free) => 7,
        Answer::Report(Report::Abstains) => 8,
        Answer::Report(_) => 9,
        Answer::Standing(..) => unreachable!("nobody asked"),
    }
}
