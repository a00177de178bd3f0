//! `lockkit list`.

use std::{
    fs::{File, OpenOptions},
    io::Read,
    os::unix::fs::OpenOptionsExt,
    process::Stdio,
    sync::{Arc, Mutex},
};

use rustix::{
    fs::OFlags,
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};
use serde_json::Value;

use crate::tool::{Running, Site, eventually, outcome};

fn holding(site: &Site, options: &[&str], name: &str) -> Running {
    let run = [
        &["run"],
        options,
        &[name, "--", "sh", "-c", "echo up; exec sleep 60"],
    ]
    .concat();
    let mut running = Running::spawn(&mut site.lockkit(&run));
    assert_eq!(running.line(), "up");
    running
}

fn names(site: &Site, prefix: &[&str]) -> Vec<(String, String)> {
    let (status, shown, complaint) = outcome(&mut site.lockkit(&[&["list", "--json"], prefix].concat()));
    assert_eq!((status, complaint.as_str()), (0, ""), "{shown}");
    let mut found = Vec::new();
    for line in shown.lines() {
        let lock: Value = serde_json::from_str(line).unwrap();
        assert_eq!(lock["holders"][0]["label"], "host-7", "{line}");
        assert!(lock["holders"][0]["token"].is_u64(), "{line}");
        assert!(
            lock["holders"][0]["since"].as_str().unwrap().starts_with("20"),
            "{line}"
        );
        let text = |field: &str| lock[field].as_str().unwrap().to_owned();
        found.push((text("name"), text("kind")));
    }
    found.sort();
    found
}

#[test]
fn what_is_held_is_listed_and_what_is_free_is_not() {
    let site = Site::new();
    assert_eq!(
        outcome(&mut site.lockkit(&["list"])),
        (0, String::new(), String::new())
    );
    let label = ["--label", "host-7"];
    let _one = holding(&site, &label, "a*\n1");
    let mut two = holding(&site, &label, "ab");
    let _three = holding(&site, &["--label", "host-7", "--permits", "2"], "ab");
    let pair = |name: &str, kind: &str| (name.to_owned(), kind.to_owned());
    let (odd, lock, semaphore) = (pair("a*\n1", "lock"), pair("ab", "lock"), pair("ab", "semaphore"));
    assert_eq!(names(&site, &[]), [odd.clone(), lock.clone(), semaphore.clone()]);
    assert_eq!(names(&site, &["a*"]), [odd]);
    assert_eq!(names(&site, &["ab"]), [lock, semaphore.clone()]);
    assert_eq!(names(&site, &["b"]), []);

    let (status, shown, _) = outcome(&mut site.lockkit(&["list", "a*"]));
    assert_eq!(status, 0);
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines[0], "a*\\n1: held", "{shown}");
    assert!(lines[1].contains("by host-7, since 20"), "{shown}");
    two.close_input();
    two.signal(Signal::TERM);
    two.end();
    assert_eq!(names(&site, &["ab"]), [semaphore]);
}

#[test]
fn without_a_terminal_nothing_is_watched() {
    let site = Site::new();
    let (status, shown, complaint) = outcome(&mut site.lockkit(&["list", "--watch"]));
    assert_eq!((status, shown.as_str()), (125, ""));
    assert!(complaint.contains("--watch draws on a terminal"), "{complaint}");
}

/// The terminal's side of `lockkit list --watch`: everything that it has drawn so far.
struct Screen(Arc<Mutex<String>>);

impl Screen {
    /// Returns what the terminal shows: the last table.
    fn shows(&self) -> String {
        let drawn = self.0.lock().unwrap();
        let whole = drawn.rfind("\x1b[J").unwrap_or(0);
        let begin = drawn[..whole].rfind("\x1b[H").unwrap_or(0);
        drawn[begin..whole].to_owned()
    }
}

#[test]
fn a_table_on_the_terminal_follows_what_is_held() {
    let site = Site::new();
    let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&keys).unwrap();
    unlockpt(&keys).unwrap();
    let name = ptsname(&keys, Vec::new()).unwrap();
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NOCTTY.bits().cast_signed())
        .open(name.to_str().unwrap())
        .unwrap();
    let first = holding(&site, &["--label", "host-7"], "jobs/1");
    let mut watching = site
        .lockkit(&["list", "--watch", "jobs/"])
        .stdout(terminal)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let screen = Screen(Arc::default());
    let drawn = Arc::clone(&screen.0);
    let mut keys = File::from(keys);
    std::thread::spawn(move || {
        let mut buffer = [0; 4_096];
        // Ends with the terminal's last user.
        while let Ok(read @ 1..) = keys.read(&mut buffer) {
            drawn
                .lock()
                .unwrap()
                .push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
    });
    eventually("one is shown", || {
        let shown = screen.shows();
        (shown.contains("1 held under jobs/") && shown.contains("jobs/1") && shown.contains("host-7"))
            .then_some(())
    });
    let second = holding(&site, &[], "jobs/2");
    eventually("two are shown", || {
        let shown = screen.shows();
        (shown.contains("2 held") && shown.contains("jobs/1") && shown.contains("jobs/2")).then_some(())
    });
    drop((first, second));
    eventually("none is shown", || {
        let shown = screen.shows();
        (shown.contains("0 held") && !shown.contains("jobs/1")).then_some(())
    });
    crate::tool::signal_to(i32::try_from(watching.id()).unwrap(), Signal::INT);
    let status = eventually("Ctrl-C ends it", || watching.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}
