//! The catalogue of errors, `docs/errors.md`: each of its lines is what is printed in a situation that a test brings a server into.
//!
//! `LOCKKIT_RENEW=1 cargo test -p lockkit-cli --test it -- catalogue` writes the page anew.

use std::{
    env, fs, iter,
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use lockkit::{Error, LockClient, LockConfig};

use crate::tool::{in_this_process, lockkit};

mod etcd;
mod file;
mod mysql;
mod postgres;
mod redis;
mod redlock;
mod zookeeper;

/// In every password, and in no line that is printed.
const SECRET: &str = "canary";
/// The most that a line may have, so that it is read.
const LONGEST: usize = 300;
/// Situations that are brought about at a time: they wait more than they work.
const AT_ONCE: usize = 4;

/// The parts that a line has to have, each once.
pub(crate) struct Says {
    /// The server's or the system's own words.
    words: &'static str,
    /// The advice.
    advice: &'static str,
    /// The thing that is told by its name, as often as it takes: a server, a key, a table, a right.
    names: Vec<String>,
}

pub(crate) fn says(words: &'static str, advice: &'static str) -> Says {
    Says {
        words,
        advice,
        names: Vec::new(),
    }
}

impl Says {
    pub(crate) fn of(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }
}

/// The lines that were printed in a situation.
pub(crate) struct Printed {
    library: String,
    transient: bool,
    /// The line and the status.
    command: Option<(String, i32)>,
}

struct Situation<'a> {
    what: &'static str,
    says: Says,
    happens: Box<dyn FnOnce() -> Printed + Send + 'a>,
    to_do: &'static str,
    /// It cannot be brought about here: its row stays as it is.
    is_kept: bool,
}

/// The table of one backend.
pub(crate) struct Table<'a> {
    backend: &'static str,
    /// The servers that said so. Others have other words.
    servers: String,
    situations: Vec<Situation<'a>>,
}

impl<'a> Table<'a> {
    pub(crate) fn new(backend: &'static str, servers: impl Into<String>) -> Self {
        Self {
            backend,
            servers: servers.into(),
            situations: Vec::new(),
        }
    }

    /// Adds what is printed when this `happens`, and what to do then.
    pub(crate) fn row(
        &mut self,
        what: &'static str,
        says: Says,
        to_do: &'static str,
        happens: impl FnOnce() -> Printed + Send + 'a,
    ) {
        self.row_where(true, what, says, to_do, happens);
    }

    /// The same for what not every machine `can` do, for want of a right for one.
    pub(crate) fn row_where(
        &mut self,
        can: bool,
        what: &'static str,
        says: Says,
        to_do: &'static str,
        happens: impl FnOnce() -> Printed + Send + 'a,
    ) {
        if !can {
            println!("not brought about here: {what}");
        }
        self.situations.push(Situation {
            what,
            says,
            happens: Box::new(happens),
            to_do,
            is_kept: !can,
        });
    }

    /// Brings about every situation, and compares what is printed with the page.
    pub(crate) fn check(self) {
        let jobs: Vec<_> = self
            .situations
            .into_iter()
            .map(
                |Situation {
                     what,
                     says,
                     happens,
                     to_do,
                     is_kept,
                 }| {
                    let happens = (!is_kept).then_some(happens);
                    (what, says, to_do, is_kept, Mutex::new((happens, None)))
                },
            )
            .collect();
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| {
                    while let Some((.., job)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let Some(happens) = job.lock().unwrap().0.take() else {
                            continue;
                        };
                        // The others are told, too. Its panic has been printed.
                        let printed = panic::catch_unwind(AssertUnwindSafe(happens));
                        job.lock().unwrap().1 = printed.ok();
                    }
                });
            }
        });
        let mut text = format!(
            "## {}\n\n{}\n\n| situation | the library says | `lockkit` says, and its status | transient | what to do |\n|---|---|---|---|---|\n",
            self.backend, self.servers
        );
        let mut faults = Vec::new();
        for (what, says, to_do, is_kept, job) in jobs {
            if is_kept {
                text += &recorded(self.backend, what);
                continue;
            }
            let Some(printed) = job.into_inner().unwrap().1 else {
                faults.push(format!("{what}: a panic"));
                continue;
            };
            faults.extend(printed.faults(&says).map(|fault| format!("{what}: {fault}")));
            text += &printed.row(what, to_do);
        }
        compare(self.backend, &text);
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}

impl Printed {
    /// The faults of what was printed.
    fn faults(&self, says: &Says) -> impl Iterator<Item = String> {
        let mut faults = Vec::new();
        let line = &brief(&self.library);
        for (what, part) in [("words", says.words), ("advice", says.advice)] {
            let times = line.matches(part).count();
            if !part.is_empty() && times != 1 {
                faults.push(format!("the {what} {part:?} are told {times} times: {line}"));
            }
        }
        for name in says.names.iter().filter(|name| !line.contains(*name)) {
            faults.push(format!("{name:?} is not named: {line}"));
        }
        if let Some((line, status)) = &self.command
            && (*status == 101 || (*status == 0 && !line.is_empty()))
        {
            faults.push(format!("status {status}: {line}"));
        }
        let command = self.command.as_ref().map(|(line, _)| brief(line));
        for line in [Some(line), command.as_ref()].into_iter().flatten() {
            if let Some(twice) = told_twice(line) {
                faults.push(format!("{twice:?} is told twice: {line}"));
            }
            if line.contains(SECRET) {
                faults.push(format!("a secret: {line}"));
            }
            if line.chars().count() > LONGEST {
                faults.push(format!("{} characters: {line}", line.chars().count()));
            }
        }
        faults.into_iter()
    }

    fn row(&self, what: &str, to_do: &str) -> String {
        let library = steady(&self.library);
        let command = match &self.command {
            None => String::new(),
            Some((line, 0)) if line.is_empty() => "nothing, 0".to_owned(),
            Some((line, status)) if steady(line) == library => format!("the same, {status}"),
            Some((line, status)) => format!("{}, {status}", code(&steady(line))),
        };
        let transient = if self.transient { "yes" } else { "no" };
        format!(
            "| {what} | {} | {command} | {transient} | {to_do} |\n",
            code(&library)
        )
    }
}

/// Leaves out statements that are there to be copied from a log.
fn brief(line: &str) -> String {
    ["have it made with: ", "have them made with: "]
        .into_iter()
        .find_map(|advice| Some(format!("{}{advice}STATEMENTS", line.split_once(advice)?.0)))
        .unwrap_or_else(|| line.to_owned())
}

/// Returns four words that come twice: then a cause does.
fn told_twice(line: &str) -> Option<String> {
    let words: Vec<_> = line
        .split(|c: char| c.is_whitespace() || ":;,()".contains(c))
        // Addresses are told as often as it takes.
        .filter(|word| !word.is_empty() && !word.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    let mut runs: Vec<_> = words.windows(4).collect();
    runs.sort_unstable();
    let twice = runs.windows(2).find(|two| two[0] == two[1])?;
    Some(twice[0].join(" "))
}

/// Puts it into a cell of a table, as it is.
fn code(line: &str) -> String {
    let line = line.replace('|', "\\|");
    // Words in backticks are code in code.
    format!("`` {line} ``")
}

/// Replaces what differs from time to time: an address on loopback is HOST:PORT, a path below the directory for temporary files DIR,
/// a time with a fraction TIME, statements to copy STATEMENTS, and a hash or an id of six digits or more ID.
fn steady(line: &str) -> String {
    let line = &brief(line);
    let temporary = format!("{}/", env::temp_dir().display());
    let is_end = |c: char| c.is_whitespace() || "/,;:)`'\"".contains(c);
    let mut text = String::new();
    let mut rest = line.as_str();
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix(&temporary) {
            text += "DIR";
            rest = &after[after.find(is_end).unwrap_or(after.len())..];
            continue;
        }
        if let Some(after) = rest
            .strip_prefix("127.0.0.1:")
            .or_else(|| rest.strip_prefix("localhost:"))
        {
            text += "HOST:PORT";
            rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
            continue;
        }
        if c.is_ascii_digit()
            && let end = rest
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '.')
                .unwrap_or(rest.len())
            && let (time, after) = rest.split_at(end)
            && time.contains('.')
            && time.ends_with('s')
        {
            text += "TIME";
            rest = after;
            continue;
        }
        if c.is_ascii_alphanumeric() {
            let end = rest
                .find(|c: char| !c.is_ascii_alphanumeric())
                .unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let is_id = word.len() >= 6
                && word.chars().all(|c| c.is_ascii_hexdigit())
                && word.chars().any(|c| c.is_ascii_digit());
            text += if is_id { "ID" } else { word };
            rest = after;
            continue;
        }
        text.push(c);
        rest = &rest[c.len_utf8()..];
    }
    text
}

/// Whoever reads or writes the page has it.
static PAGE: Mutex<()> = Mutex::new(());

fn page_path() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors.md"))
}

/// Returns where a section begins and ends on the page.
fn place(page: &str, backend: &str) -> (usize, usize) {
    let heading = format!("## {backend}\n");
    let begin = page
        .find(&heading)
        .unwrap_or_else(|| panic!("docs/errors.md has no section {backend}"));
    let behind = begin + heading.len();
    let end = page[behind..]
        .find("\n## ")
        .map_or(page.len(), |at| behind + at + 1);
    (begin, end)
}

/// Returns the row of a situation as it is on the page.
fn recorded(backend: &str, what: &str) -> String {
    let _page = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let page = fs::read_to_string(page_path()).unwrap();
    let (begin, end) = place(&page, backend);
    let row = format!("| {what} |");
    let row = page[begin..end].lines().find(|line| line.starts_with(&row));
    row.map_or_else(String::new, |row| format!("{row}\n"))
}

/// Compares a section with the page, or writes it anew.
fn compare(backend: &str, section: &str) {
    let _page = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = page_path();
    let page = fs::read_to_string(&path).unwrap();
    let (begin, end) = place(&page, backend);
    if env::var("LOCKKIT_RENEW").is_ok_and(|renew| renew == "1") {
        let last = if end == page.len() { "" } else { "\n" };
        fs::write(&path, [&page[..begin], section, last, &page[end..]].concat()).unwrap();
        return;
    }
    let (recorded, now) = (page[begin..end].trim_end(), section.trim_end());
    let differ: Vec<_> = now
        .lines()
        .filter(|line| !recorded.lines().any(|other| other == *line))
        .map(|line| format!("is printed:  {line}"))
        .chain(
            recorded
                .lines()
                .filter(|line| !now.lines().any(|other| other == *line))
                .map(|line| format!("on the page: {line}")),
        )
        .collect();
    assert!(
        recorded == now,
        "docs/errors.md differs from what is printed. If it should, renew it: \
         LOCKKIT_RENEW=1 cargo test -p lockkit-cli --test it -- catalogue\n{}",
        differ.join("\n")
    );
}

/// The error of connecting.
pub(crate) fn connecting(url: &str) -> Printed {
    let error = in_this_process(async { connect(url).await.unwrap_err() });
    printed(&error, url)
}

/// The error of a lock that is tried for on a fresh connection.
pub(crate) fn trying(url: &str) -> Printed {
    meanwhile(url, |_| ())
}

/// The error of a lock that is tried for when `something` happened while its client was connected.
pub(crate) fn meanwhile(url: &str, something: impl FnOnce(&LockClient)) -> Printed {
    let error = in_this_process(async {
        let client = connect(url).await.unwrap();
        something(&client);
        client.lock("job").unwrap().try_acquire().await.unwrap_err()
    });
    printed(&error, url)
}

pub(crate) async fn connect(url: &str) -> lockkit::Result<LockClient> {
    LockConfig::new(patient(url)).connect().await
}

/// The machine may be busy: only a situation that is about the time has its own.
fn patient(url: &str) -> String {
    if url.contains("connect_timeout") {
        return url.to_owned();
    }
    let sign = if url.contains('?') { '&' } else { '?' };
    format!("{url}{sign}connect_timeout=60s")
}

/// Prints what the library says, and what the command does in the same situation.
pub(crate) fn printed(error: &Error, url: &str) -> Printed {
    let command = ["run", "--try", "--url", &patient(url), "job", "--", "true"];
    let output = lockkit(&command).output().unwrap();
    let complaints = String::from_utf8(output.stderr).unwrap();
    // What comes before are warnings.
    let last = complaints.lines().last().unwrap_or_default();
    Printed {
        library: whole(error),
        transient: error.is_transient(),
        command: Some((
            last.strip_prefix("lockkit: ").unwrap_or(last).to_owned(),
            output.status.code().unwrap(),
        )),
    }
}

/// Asks until it is so.
pub(crate) fn until(what: &str, mut ask: impl FnMut() -> bool) {
    crate::tool::eventually(what, || ask().then_some(()));
}

/// Prints what the library says, where the command has no such situation of its own.
pub(crate) fn alone(error: &Error) -> Printed {
    Printed {
        library: whole(error),
        transient: error.is_transient(),
        command: None,
    }
}

/// The error and all its causes, as the guide tells to print them.
fn whole(error: &Error) -> String {
    let error: &dyn std::error::Error = error;
    let causes: Vec<_> = iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect();
    causes.join(": ")
}
