use std::{
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::process::{spawn_for_good, tied};

/// A program that holds locks by a client library of another language. It is told what to do by lines on its standard
/// input and answers each with a line on its standard output.
///
/// It should end when its input does, and is killed on drop.
///
/// ```
/// use std::process::Command;
///
/// use lockkit_testbed::Peer;
///
/// # fn main() -> std::io::Result<()> {
/// let mut peer = Peer::start(&Command::new("cat"))?;
/// assert_eq!(peer.ask("acquire")?, "acquire");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    answers: mpsc::Receiver<String>,
}

impl Peer {
    /// The time that an answer may take that does not depend on anybody else.
    const LIMIT: Duration = Duration::from_secs(30);

    /// Starts the program. What it says on its standard error goes to that of the test.
    ///
    /// # Errors
    /// If the system cannot start it.
    pub fn start(command: &Command) -> io::Result<Self> {
        let mut command = tied(command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let (_, child) = spawn_for_good(command)?;
        let mut child = child?;
        let (said, answers) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if said.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            input: child.stdin.take(),
            child,
            answers,
        })
    }

    /// Tells it what to do.
    ///
    /// # Errors
    /// If it has ended.
    pub fn tell(&mut self, what: &str) -> io::Result<()> {
        let input = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "{what}")?;
        input.flush()
    }

    /// Its next answer.
    ///
    /// # Errors
    /// If there is none within half a minute, or it has ended.
    pub fn hear(&self) -> io::Result<String> {
        let answer = self.answers.recv_timeout(Self::LIMIT);
        answer.map_err(|error| io::Error::other(format!("no answer: {error}")))
    }

    /// Returns whether it has answered nothing for so long.
    pub fn is_silent_for(&self, while_waiting: Duration) -> bool {
        self.answers.recv_timeout(while_waiting).is_err()
    }

    /// Asks it to end (SIGTERM), and waits until it has.
    ///
    /// # Errors
    /// If it does not within half a minute.
    pub fn end(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + Self::LIMIT;
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if self.child.try_wait()?.is_none() {
            kill_process(pid.ok_or(io::ErrorKind::InvalidInput)?, Signal::TERM)?;
        }
        while self.child.try_wait()?.is_none() {
            if Instant::now() >= deadline {
                return Err(io::Error::other("it does not end"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Tells it what to do, and waits for the answer.
    ///
    /// # Errors
    /// As for [`tell`](Self::tell) and [`hear`](Self::hear).
    pub fn ask(&mut self, what: &str) -> io::Result<String> {
        self.tell(what)?;
        self.hear()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns why `python3` lacks a module, and what to do; `None` if it is there.
pub fn missing_python(module: &str) -> Option<String> {
    let looked = Command::new("python3")
        .args(["-c", &format!("import {module}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match looked {
        Ok(status) if status.success() => None,
        Ok(_) => Some(format!(
            "python3 has no module {module}; python3 -m pip install {module}"
        )),
        Err(error) => Some(format!("python3 cannot be run ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_answers_line_by_line_and_ends() {
        let mut peer = Peer::start(&Command::new("cat")).unwrap();
        assert!(peer.is_silent_for(Duration::from_millis(20)));
        assert_eq!(peer.ask("one").unwrap(), "one");
        peer.tell("two").unwrap();
        peer.tell("three").unwrap();
        assert_eq!(
            (peer.hear().unwrap(), peer.hear().unwrap()),
            ("two".into(), "three".into())
        );
        let pid = peer.child.id();
        drop(peer);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn it_is_asked_to_end_and_may_do_something_before() {
        let script = "trap 'echo done; exit' TERM; echo ready; while :; do sleep 0.01; done";
        let mut peer = Peer::start(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(peer.hear().unwrap(), "ready");
        peer.end().unwrap();
        assert_eq!(peer.hear().unwrap(), "done");
        peer.end().unwrap();
    }

    #[test]
    fn one_that_has_ended_is_an_error() {
        let peer = Peer::start(&Command::new("true")).unwrap();
        assert!(peer.hear().is_err());
    }

    #[test]
    fn a_module_that_is_not_there_is_missing() {
        assert!(missing_python("no_such_module_at_all").is_some());
    }
}
