//! The results of a run of the comparison: the figures, and where they were taken.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

use lockkit_conformance::measure::{Outcome, Row, Scenario};
use serde::{Deserialize, Serialize};

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The time at which it ended, in UTC.
    pub date: String,
    /// True for a quick run.
    pub quick: bool,
    /// The duration, in seconds.
    pub seconds: u64,
    /// The machine that it ran on.
    pub machine: Machine,
    /// Versions of lockkit, the peers and the servers, by name.
    pub versions: BTreeMap<String, String>,
    /// The backends that took no part.
    pub skipped: Vec<Skipped>,
    /// The figures.
    pub rows: Vec<Row>,
    /// The figures of those who reach their servers over a network.
    #[serde(default)]
    pub far: Vec<Row>,
}

/// A backend that took no part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Its name.
    pub backend: String,
    /// Why.
    pub why: String,
}

/// A machine on which figures were taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor.
    pub processor: String,
    /// The number of its cores.
    pub cores: usize,
    /// Memory, in GiB.
    pub memory_gib: u64,
    /// The system.
    pub system: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let kib = field(&read("/proc/meminfo"), "MemTotal");
        let kib = kib.and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
        let release = read("/proc/sys/kernel/osrelease");
        let release = release.split('-').next().unwrap_or_default().trim();
        Self {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned()),
            cores: thread::available_parallelism().map_or(0, usize::from),
            memory_gib: kib.map_or(0, |kib| (kib + (1 << 19)) >> 20),
            system: format!("{} {release}", std::env::consts::OS),
        }
    }
}

impl Results {
    /// Returns the path at which the last run is kept.
    pub fn default_path() -> PathBuf {
        target_directory().join("lockkit-bench").join("matrix.json")
    }

    /// Returns the path for the run that was at `path` before.
    pub fn kept(path: &Path) -> PathBuf {
        path.with_extension("before.json")
    }

    /// Reads what [`write`](Self::write) has written.
    ///
    /// # Errors
    /// If there is no such file, or it is something else.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Writes it, with the directory if that is missing. What was there is [kept](Self::kept).
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        if path.exists() {
            fs::rename(path, Self::kept(path))?;
        }
        fs::write(path, serde_json::to_vec_pretty(self)?)
    }

    /// Returns the part that was measured over the network, as a run of its own.
    pub fn over_the_network(&self) -> Self {
        Self {
            rows: self.far.clone(),
            far: Vec::new(),
            ..self.clone()
        }
    }

    /// The rows of a scenario.
    pub fn of(&self, scenario: Scenario) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.scenario == scenario)
    }
}

/// Now, in UTC, as `2026-11-21T15:04:05Z`.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Versions of what is compiled in: lockkit's and, from the lock file that this was built with, its peers'.
pub fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::from([("lockkit".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    let lock = include_str!("../../Cargo.lock");
    for peer in ["distributed-lock-file", "rslock", "tokio", "zookeeper-client"] {
        let entry = lock.split("[[package]]").find_map(|entry| {
            let mut lines = entry.trim().lines();
            (lines.next()? == format!("name = \"{peer}\"")).then(|| lines.next())?
        });
        if let Some(version) = entry.and_then(|line| line.split('"').nth(1)) {
            versions.insert(peer.to_owned(), version.to_owned());
        }
    }
    versions
}

/// `target`, of which the running program is in `<profile>` or `<profile>/deps`.
pub fn target_directory() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let mut ancestors = program.ancestors().skip(1).filter(|path| !path.ends_with("deps"));
    ancestors
        .nth(1)
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
}

/// The rows of one scenario as lines of text.
pub fn table<'a>(scenario: Scenario, rows: impl IntoIterator<Item = &'a Row>) -> String {
    let mut text = format!("{} ({scenario})\n", scenario.title());
    let mut absent = BTreeMap::<&str, Vec<String>>::new();
    for row in rows {
        let who = format!("{}, {}", row.backend, row.contestant);
        let line = match &row.outcome {
            Outcome::Measured(_) => scenario
                .figures()
                .iter()
                .filter_map(|figure| {
                    let value = figure.show(row.value(*figure)?);
                    let spread = row.spread(*figure);
                    let spread =
                        spread.map_or_else(String::new, |spread| format!(" ±{:.0} %", spread * 100.0));
                    Some(format!("{} {value}{spread}", figure.title()))
                })
                .collect::<Vec<_>>()
                .join("   "),
            Outcome::Failed(how) => format!("FAILED: {how}"),
            Outcome::Skipped(why) => {
                absent.entry(why).or_default().push(who);
                continue;
            }
        };
        let _ = writeln!(text, "  {who:36}  {line}");
    }
    for (why, who) in absent {
        let _ = writeln!(text, "  skipped, because {why}: {}", who.join("; "));
    }
    text
}
