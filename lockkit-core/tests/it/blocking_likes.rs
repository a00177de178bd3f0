//! The blocking API beside the async one, by the record of the public API: `scripts/public-api` holds that to the code.

use std::{collections::BTreeSet, fs, path::Path};

/// What has no like of its name in the blocking API, and why.
const EXCEPTIONS: &[(&str, &str)] = &[
    (
        "HoldView::run",
        "nothing stops a thread: it calls `check` between its steps",
    ),
    (
        "LockConfig::connect",
        "`blocking::LockClient::connect_with` takes it",
    ),
    (
        "LockGuard::ended",
        "a thread that has the guard ends it; another calls `check` of a view",
    ),
    (
        "LockGuard::lost",
        "`wait_lost`, with a time-out, and `lost_reason`",
    ),
    (
        "LockGuard::run",
        "nothing stops a thread: it calls `check` between its steps",
    ),
    ("LockSet::lost", "`wait_lost`, with a time-out"),
    (
        "Observer::into_stream",
        "the blocking observer is an iterator itself",
    ),
    (
        "ReentrantOwner::scope",
        "it is of a task; a thread passes its owner on",
    ),
];

/// The traits of the async API, and the blocking type that has their calls as its own.
const TRAITS: &[(&str, &str)] = &[("DistributedLock", "Lock"), ("DistributedLockExt", "Lock")];

/// A function of the record.
#[derive(Debug)]
struct Function<'a> {
    /// The names of which its path is made up, after that of the crate and without generics.
    path: Vec<String>,
    is_async: bool,
    /// It is not in the implementation of a trait.
    is_own: bool,
    line: &'a str,
}

/// Returns the functions of a crate's record, in its order, which is that of the implementations that they are in.
fn functions<'a>(record: &'a str, name: &str) -> Vec<Function<'a>> {
    let mut is_own = true;
    let mut found = Vec::new();
    for line in record.lines() {
        let declared = ["pub fn ", "pub const fn ", "pub async fn "]
            .into_iter()
            .find_map(|start| Some((start, line.strip_prefix(start)?)));
        let Some((start, declared)) = declared else {
            if line.starts_with("impl") {
                is_own = !line.contains(" for ");
            } else if ["pub struct ", "pub enum ", "pub trait "]
                .iter()
                .any(|start| line.contains(start))
            {
                is_own = true;
            }
            continue;
        };
        let path = path(declared);
        let mut path = path.split("::").map(str::to_owned);
        if path.next().as_deref() == Some(name) {
            let is_async = start.contains("async")
                || ["impl ", "dyn "]
                    .iter()
                    .any(|form| declared.contains(&format!("{form}core::future::future::Future<Output")));
            found.push(Function {
                path: path.collect(),
                is_async,
                is_own,
                line,
            });
        }
    }
    found
}

/// Returns the path of a function, without its generics and those of its type.
fn path(declared: &str) -> String {
    let (mut path, mut depth, mut before) = (String::new(), 0_usize, ' ');
    for character in declared.chars() {
        match character {
            '<' => depth += 1,
            '>' if before != '-' => depth = depth.saturating_sub(1),
            '(' if depth == 0 => break,
            _ if depth == 0 => path.push(character),
            _ => {}
        }
        before = character;
    }
    path
}

/// The calls of the async API that ought to have a like, and those of the blocking one, each as `Type::name` or `name`.
#[derive(Default)]
struct Calls {
    of_async: BTreeSet<String>,
    of_blocking: BTreeSet<String>,
}

impl Calls {
    fn of(records: &[(&str, &str)]) -> Self {
        let all: Vec<_> = records
            .iter()
            .flat_map(|(name, record)| functions(record, name))
            .collect();
        let mut calls = Self::default();
        let mut twins: BTreeSet<&str> = BTreeSet::new();
        for function in &all {
            if let [module, of_type @ .., _] = &function.path[..]
                && module == "blocking"
            {
                calls.of_blocking.insert(function.path[1..].join("::"));
                twins.extend(of_type.first().map(String::as_str));
            }
        }
        for function in &all {
            match &function.path[..] {
                [name] if function.is_async => {
                    calls.of_async.insert(name.clone());
                }
                // What is in a module is no user's, as `spi`, or a blocking one.
                [of_type, name] if function.is_own && of_type.starts_with(char::is_uppercase) => {
                    let named = TRAITS.iter().find(|(named, _)| named == of_type);
                    let twin = named.map_or(of_type.as_str(), |(_, twin)| *twin);
                    if function.is_async || twins.contains(of_type.as_str()) {
                        calls.of_async.insert(format!("{twin}::{name}"));
                    }
                }
                _ => {}
            }
        }
        calls
    }

    /// Returns what is wrong: calls without their like, and exceptions that are none.
    fn differences(&self) -> Vec<String> {
        let is_excepted = |call: &str| EXCEPTIONS.iter().any(|(excepted, _)| *excepted == call);
        let without = self.of_async.difference(&self.of_blocking);
        let missing = without
            .filter(|call| !is_excepted(call))
            .map(|call| format!("`{call}` has no like in the blocking API"));
        let needless = EXCEPTIONS
            .iter()
            .filter(|(call, _)| !self.of_async.contains(*call) || self.of_blocking.contains(*call));
        let needless = needless.map(|(call, _)| format!("`{call}` is no exception any more"));
        missing.chain(needless).collect()
    }
}

/// Returns the records of the facade and of the core, which are all that a user has.
fn records() -> [(&'static str, String); 2] {
    [("lockkit", "lockkit.txt"), ("lockkit_core", "lockkit-core.txt")].map(|(name, file)| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../public-api")
            .join(file);
        let record = fs::read_to_string(&path);
        (
            name,
            record.unwrap_or_else(|err| panic!("{}: {err}", path.display())),
        )
    })
}

fn borrowed<'a>(records: &'a [(&'static str, String); 2]) -> [(&'static str, &'a str); 2] {
    records.each_ref().map(|(name, record)| (*name, record.as_str()))
}

#[test]
fn every_call_of_the_async_api_has_its_like() {
    let records = records();
    let calls = Calls::of(&borrowed(&records));
    for known in [
        "connect",
        "acquire_all",
        "Lock::acquire",
        "LockClient::election",
        "Observer::next",
    ] {
        assert!(
            calls.of_async.contains(known),
            "the record is read without `{known}`"
        );
    }
    let wrong = calls.differences();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The control of the comparison: a call that goes on one side, or comes on the other, is seen.
#[test]
fn a_call_without_its_like_is_seen() {
    let records = records();
    let [facade, (core, record)] = borrowed(&records);
    let all = functions(record, core);
    let line_of = |path: &str| {
        let function = all.iter().find(|function| function.path.join("::") == path);
        function.unwrap_or_else(|| panic!("no `{path}`")).line
    };
    for (call, is_told) in [
        ("Lock::acquire_many", true),
        ("LockClient::election", true),
        ("Lock::with_lock", true),
        ("try_acquire_all", true),
        // There is none there.
        ("LockClient::connect_with", false),
    ] {
        let line = line_of(&format!("blocking::{call}"));
        let less = record.replacen(&format!("{line}\n"), "", 1);
        let told = Calls::of(&[facade, (core, &less)]).differences();
        let expected: &[String] = &[format!("`{call}` has no like in the blocking API")];
        assert_eq!(told, if is_told { expected } else { &[] }, "{call}");
    }
    for (new, call) in [
        (
            "impl lockkit_core::Observer\npub async fn lockkit_core::Observer::skip<F: Fn() -> u8>(&mut self)",
            "Observer::skip",
        ),
        (
            "pub struct lockkit_core::Barrier\npub async fn lockkit_core::Barrier::wait(&self)",
            "Barrier::wait",
        ),
        (
            "pub async fn lockkit_core::acquire_some<L>(locks: &[&L])",
            "acquire_some",
        ),
    ] {
        let more = format!("{record}{new}\n");
        let told = Calls::of(&[facade, (core, &more)]).differences();
        assert_eq!(told, [format!("`{call}` has no like in the blocking API")]);
    }
    let needless = record.replacen(
        "pub async fn lockkit_core::HoldView::run",
        "pub async fn lockkit_core::HoldView::go",
        1,
    );
    let told = Calls::of(&[facade, (core, &needless)]).differences();
    assert_eq!(
        told,
        [
            "`HoldView::go` has no like in the blocking API",
            "`HoldView::run` is no exception any more"
        ]
    );
}
