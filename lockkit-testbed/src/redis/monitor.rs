use std::{
    io,
    net::Shutdown,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

use super::resp::{Access, Connection, Value};

/// Records every command that a server executes, from its start until it is dropped.
#[derive(Debug)]
pub struct Monitor {
    access: Access,
    stream: std::net::TcpStream,
    recorded: Arc<Recorded>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Recorded {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Monitor {
    pub(super) fn start(access: &Access) -> io::Result<Self> {
        let mut connection = access.connect()?;
        connection.command(&["MONITOR"])?;
        let stream = connection.stream().try_clone()?;
        // It waits for as long as nothing happens.
        stream.set_read_timeout(None)?;
        let recorded = Arc::new(Recorded::default());
        let kept = recorded.clone();
        let thread = thread::Builder::new()
            .name("redis-monitor".to_owned())
            .spawn(move || kept.record(connection))?;
        Ok(Self {
            access: access.clone(),
            stream,
            recorded,
            thread: Some(thread),
        })
    }

    /// Everything the server has executed until now, in order, one line a command, such as
    /// `1700000000.123456 [0 127.0.0.1:40000] "GET" "key"`. What a script executes has `lua` for an address.
    ///
    /// # Errors
    /// If the server is gone or does not answer.
    pub fn lines(&self) -> io::Result<Vec<String>> {
        // What was executed before the mark is recorded before it.
        let mark = format!("monitor-mark-{}", fresh());
        self.access.command(&["ECHO", &mark])?;
        let mut lines = self.recorded.lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(end) = lines.0.iter().position(|line| line.contains(&mark)) {
                let seen = lines.0[..end]
                    .iter()
                    .filter(|line| !line.contains("\"monitor-mark-"));
                return Ok(seen.cloned().collect());
            }
            if lines.1 {
                return Err(io::Error::other("the server has ended the recording"));
            }
            let (again, waited) = self
                .recorded
                .more
                .wait_timeout(lines, Duration::from_secs(20))
                .unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return Err(io::Error::other("the server records nothing"));
            }
            lines = again;
        }
    }
}

/// A number that no other call in this process gets.
fn fresh() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

impl Recorded {
    fn record(&self, mut connection: Connection) {
        loop {
            let value = connection.value();
            let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            match value {
                Ok(Ok(Value::Text(line))) => lines.0.push(line),
                Ok(_) => {}
                Err(_) => lines.1 = true,
            }
            self.more.notify_all();
            if lines.1 {
                return;
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // It may be closed already; the thread ends either way.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
