use std::{
    collections::{HashMap, VecDeque},
    fmt, io, mem,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::net::{Shutdown, shutdown, sockopt::set_socket_linger};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{Port, alarm::Alarm};

/// A TCP proxy between a client and its server that misbehaves on command.
///
/// It runs on a thread of its own, so that it goes on while a test blocks. Each command takes effect on connections
/// old and new, and has done so when it returns: no byte passes in the old mode afterwards.
///
/// Dropping it resets all connections.
#[derive(Debug)]
pub struct Proxy {
    port: Arc<Port>,
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    thread: Option<thread::JoinHandle<()>>,
}

/// The way in which a [`Proxy`] treats what it is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Everything passes at once. A connection that the server refuses is reset.
    #[default]
    Pass,
    /// Requests reach the server; what the server answers is lost, the end of the connection included.
    ///
    /// A connection that has lost bytes can never be in step again: it is reset as soon as the mode lets replies pass.
    DropReplies,
    /// Everything passes later, in order and however much of it there is: a longer way, not a narrower one. To some
    /// tens of microseconds.
    Delay {
        /// From the client to the server.
        requests: Duration,
        /// From the server to the client.
        replies: Duration,
    },
    /// Nothing passes in either direction, the end of a connection included. New connections are accepted and hang.
    ///
    /// Nothing is lost: what was held back is delivered once the mode lets it pass, as TCP would retransmit it. A
    /// connection begun meanwhile reaches the server then.
    Blackhole,
    /// The server's side of every connection is reset, the client's stays open and silent: as if a firewall had
    /// forgotten them. New connections are accepted and are silent too.
    ///
    /// Such a connection stays as it is under every later mode, until its client closes it or
    /// [`Proxy::reset`]. So `HalfOpen` followed by `Pass` is a client that is cut off among others that are not.
    HalfOpen,
    /// Requests pass at once, and replies one byte each 100 ms, so that whoever waits for the next byte alone waits for very long.
    Trickle,
    /// Nobody listens: new connections are refused. Existing ones pass.
    Refuse,
}

/// The traffic through a [`Proxy`] since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted, also those that then hang.
    pub connections: u64,
    /// The requests that were handed on to the server.
    pub requests: Traffic,
    /// The replies that were handed on to the clients.
    pub replies: Traffic,
    /// Round trips, as far as they can be told from outside: how often a client sent something after the proxy had
    /// handed a reply to one, whichever connections these were. What several send at once is one. Under [`Mode::Delay`]
    /// something is also sent anew when a reply to the last that was would have been back: a request that waits at the
    /// server has none.
    pub round_trips: u64,
    /// The lost traffic: replies under [`Mode::DropReplies`], and all that a client sent into a half-open connection.
    pub lost: Traffic,
}

/// A number of bytes, and in how many pieces they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes.
    pub bytes: u64,
    /// Pieces: what could be read at once, at most 16 KiB. A client that waits for each reply before its next short
    /// request makes one piece per request; several requests under way may come as one.
    pub chunks: u64,
}

impl Proxy {
    /// A proxy to the server at `upstream`, which need not be there yet. It starts in [`Mode::Pass`].
    ///
    /// # Errors
    /// If there is no free port, or the system refuses a thread.
    pub fn start(upstream: SocketAddr) -> io::Result<Self> {
        Self::start_and_edit(upstream, |_| {})
    }

    /// Starts a proxy as [`start`](Self::start) does, and has `edit` change the first piece that a client sends on a connection.
    pub(crate) fn start_and_edit(upstream: SocketAddr, edit: fn(&mut Vec<u8>)) -> io::Result<Self> {
        Self::start_with(upstream, None, edit)
    }

    /// Starts a proxy of which each connection leads where `route` says, from the address of the client and that of the proxy. One
    /// that it knows no way for is asked for again for a while, then reset.
    pub(crate) fn start_and_route(
        route: impl Fn(SocketAddr, SocketAddr) -> Option<SocketAddr> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
        Self::start_with(nowhere, Some(Route(Box::new(route))), |_| {})
    }

    fn start_with(upstream: SocketAddr, route: Option<Route>, edit: fn(&mut Vec<u8>)) -> io::Result<Self> {
        let port = Arc::new(Port::reserve()?);
        let shared = Arc::new(Shared {
            mode: watch::Sender::new(Mode::Pass),
            upstream: Mutex::new(upstream),
            counts: Mutex::default(),
            turn: Mutex::default(),
            recording: Mutex::default(),
            route,
            edit,
        });
        let (orders, incoming) = mpsc::unbounded_channel();
        let mut control = Control {
            port: port.clone(),
            shared: shared.clone(),
            listener: None,
            connections: HashMap::new(),
            next: 0,
        };
        let (started, wait) = std::sync::mpsc::channel();
        let thread = thread::Builder::new()
            .name("fault-proxy".to_owned())
            .spawn(move || {
                let runtime = match runtime() {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(started.send(Err(error))),
                };
                runtime.block_on(async {
                    let listening = control.listen();
                    let goes_on = listening.is_ok();
                    let _ = started.send(listening);
                    if goes_on {
                        control.run(incoming).await;
                    }
                });
            })?;
        wait.recv().map_err(io::Error::other)??;
        Ok(Self {
            port,
            shared,
            orders,
            thread: Some(thread),
        })
    }

    /// Returns the address that clients connect to, on 127.0.0.1. It stays the same.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Switches to `mode`.
    pub fn set(&self, mode: Mode) {
        self.order(Action::Set(mode));
    }

    /// The mode it is in.
    pub fn mode(&self) -> Mode {
        *self.shared.mode.borrow()
    }

    /// Resets (RST) all connections, on both sides, half-open ones included. The mode stays as it is, so that under
    /// [`Mode::Pass`] those that follow pass.
    pub fn reset(&self) {
        self.order(Action::Reset);
    }

    /// Has the server be away: silent, or with every connection reset and new ones refused. `None` ends that.
    pub fn set_outage(&self, is_silent: Option<bool>) {
        match is_silent {
            None => self.set(Mode::Pass),
            Some(true) => self.set(Mode::Blackhole),
            Some(false) => {
                self.set(Mode::Refuse);
                self.reset();
            }
        }
    }

    /// Sets where connections begun from now on lead. Existing ones stay where they are; [`reset`](Self::reset) ends
    /// them.
    pub fn set_upstream(&self, upstream: SocketAddr) {
        *lock(&self.shared.upstream) = upstream;
    }

    /// Records from now on what comes from either side, of all connections one after the other, as somebody on the network would.
    pub fn record(&self) {
        lock(&self.shared.recording).get_or_insert_default();
    }

    /// Returns the [recording](Self::record) so far.
    pub fn recording(&self) -> Vec<u8> {
        lock(&self.shared.recording).clone().unwrap_or_default()
    }

    /// Returns the traffic so far.
    pub fn counts(&self) -> Counts {
        *lock(&self.shared.counts)
    }

    /// Hands `action` to the proxy's thread and waits until it is done: microseconds, since that thread never blocks.
    fn order(&self, action: Action) {
        let (done, wait) = std::sync::mpsc::channel();
        // The thread ends with this value and not before, unless it panicked, which it has printed.
        if self.orders.send(Order { action, _done: done }).is_ok() {
            let _ = wait.recv();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.order(Action::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Order {
    action: Action,
    /// Dropped when the action is done, which is what its sender waits for.
    _done: std::sync::mpsc::Sender<()>,
}

#[derive(Debug)]
enum Action {
    Set(Mode),
    Reset,
    End,
}

#[derive(Debug)]
struct Shared {
    mode: watch::Sender<Mode>,
    upstream: Mutex<SocketAddr>,
    counts: Mutex<Counts>,
    turn: Mutex<Turn>,
    /// The bytes that came from either side since the recording began, if there is one.
    recording: Mutex<Option<Vec<u8>>>,
    /// The way of each connection, where that is not the same for all.
    route: Option<Route>,
    edit: fn(&mut Vec<u8>),
}

/// Says where a connection leads, from the address of its client and that of the proxy.
struct Route(Box<RouteFn>);

type RouteFn = dyn Fn(SocketAddr, SocketAddr) -> Option<SocketAddr> + Send + Sync;

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Route")
    }
}

impl Shared {
    async fn upstream_of(&self, client: &Socket) -> io::Result<SocketAddr> {
        let Some(Route(route)) = &self.route else {
            return Ok(*lock(&self.upstream));
        };
        let (from, to) = (client.stream.peer_addr()?, client.stream.local_addr()?);
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            match route(from, to) {
                Some(upstream) => return Ok(upstream),
                None if Instant::now() < deadline => sleep(Duration::from_millis(10)).await,
                None => return Err(io::ErrorKind::AddrNotAvailable.into()),
            }
        }
    }
}

/// The round trip that is under way.
#[derive(Clone, Copy, Debug, Default)]
enum Turn {
    #[default]
    Nobodys,
    Since(Instant),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
}

/// The longest time that a process takes from its beginning to its program.
const FORKED: Duration = Duration::from_secs(20);

/// The proxy's thread: accepts connections, and does what it is told.
struct Control {
    port: Arc<Port>,
    shared: Arc<Shared>,
    listener: Option<TcpListener>,
    connections: HashMap<u64, Connection>,
    next: u64,
}

struct Connection {
    /// Its task has it, so that it is closed when the task ends.
    client: Weak<Socket>,
    /// True if bytes to the client were lost.
    out_of_step: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Control {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order { action: Action::Set(mode), _done }) => self.set(mode).await,
                    Some(Order { action: Action::Reset, _done }) => self.end_connections(|_| true).await,
                    Some(Order { action: Action::End, _done }) => return self.end_connections(|_| true).await,
                    None => return,
                },
                client = accept(self.listener.as_ref()) => self.begin(client),
            }
        }
    }

    fn listen(&mut self) -> io::Result<()> {
        let socket = TcpSocket::new_v4()?;
        // The port's reservation asks for it.
        socket.set_reuseaddr(true)?;
        socket.bind(self.port.addr())?;
        self.listener = Some(socket.listen(1024)?);
        Ok(())
    }

    /// A process that is just being started has the socket that was closed until it runs its program, which may take a
    /// busy machine a while.
    async fn listen_again(&mut self) {
        let deadline = Instant::now() + FORKED;
        loop {
            match self.listen() {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    sleep(Duration::from_millis(1)).await;
                }
                listening => return listening.expect("the port is reserved for this proxy"),
            }
        }
    }

    fn begin(&mut self, client: TcpStream) {
        self.connections
            .retain(|_, connection| !connection.task.is_finished());
        lock(&self.shared.counts).connections += 1;
        let client = Arc::new(Socket::new(client));
        let out_of_step = Arc::new(AtomicBool::new(false));
        let connection = Connection {
            client: Arc::downgrade(&client),
            out_of_step: out_of_step.clone(),
            task: tokio::spawn(serve(client, self.shared.clone(), out_of_step)),
        };
        self.connections.insert(self.next, connection);
        self.next += 1;
    }

    async fn set(&mut self, mode: Mode) {
        self.shared.mode.send_replace(mode);
        if mode == Mode::Refuse {
            self.listener = None;
        } else if self.listener.is_none() {
            self.listen_again().await;
        }
        if mode == Mode::HalfOpen {
            for connection in self.connections.values_mut() {
                if let Some(client) = connection.client.upgrade() {
                    end(&mut connection.task).await;
                    connection.task = tokio::spawn(silence(client, self.shared.clone()));
                }
            }
        } else if mode.delay(Way::Reply).is_some() && mode != Mode::DropReplies {
            self.end_connections(|connection| connection.out_of_step.load(Ordering::Relaxed))
                .await;
        }
    }

    /// Ends those that `which` picks. Their sockets are dropped, and with that reset, before it returns.
    async fn end_connections(&mut self, which: impl Fn(&Connection) -> bool) {
        for (_, mut connection) in self.connections.extract_if(|_, connection| which(connection)) {
            end(&mut connection.task).await;
        }
    }
}

async fn end(task: &mut JoinHandle<()>) {
    task.abort();
    // Aborted is what it should be; a panic has been printed.
    let _ = task.await;
}

async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((client, _)) => return client,
            // Out of file descriptors, perhaps; it is not to spin on that.
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

/// One side of a connection. Dropped, it is reset, unless it came to its end in order.
#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    ended: AtomicBool,
}

impl Socket {
    fn new(stream: TcpStream) -> Self {
        // Without it a chunk may wait for the acknowledgement of the one before.
        let _ = stream.set_nodelay(true);
        Self {
            stream,
            ended: AtomicBool::new(false),
        }
    }

    /// From now on dropping it closes it in order.
    fn end_in_order(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !*self.ended.get_mut() {
            // With no time to linger, closing sends RST.
            let _ = set_socket_linger(&self.stream, Some(Duration::ZERO));
        }
    }
}

/// One connection, from its first byte to its end.
async fn serve(client: Arc<Socket>, shared: Arc<Shared>, out_of_step: Arc<AtomicBool>) {
    let mut mode = shared.mode.subscribe();
    let begun = mode
        .wait_for(|mode| *mode != Mode::Blackhole)
        .await
        .map(|mode| *mode);
    let Ok(begun) = begun else {
        return;
    };
    if begun == Mode::HalfOpen {
        return silence(client, shared).await;
    }
    let Ok(upstream) = shared.upstream_of(&client).await else {
        return;
    };
    let Ok(server) = TcpStream::connect(upstream).await else {
        return;
    };
    let server = Socket::new(server);
    let requests = Flow::new(Way::Request, &client, &server, &shared, &out_of_step);
    let replies = Flow::new(Way::Reply, &server, &client, &shared, &out_of_step);
    match tokio::try_join!(requests.run(), replies.run()) {
        Ok(_) => {
            client.end_in_order();
            server.end_in_order();
        }
        // That the server is gone would be a reply as well.
        Err(_) if *shared.mode.borrow() == Mode::DropReplies => {
            out_of_step.store(true, Ordering::Relaxed);
            drop(server);
            std::future::pending::<()>().await;
        }
        Err(_) => {}
    }
}

/// A connection without a server. It ends when the client ends it.
async fn silence(client: Arc<Socket>, shared: Arc<Shared>) {
    let mut buffer = vec![0; CHUNK];
    while client.stream.readable().await.is_ok() {
        match client.stream.try_read(&mut buffer) {
            Ok(0) => return client.end_in_order(),
            Ok(length) => count(&mut lock(&shared.counts).lost, length),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

const CHUNK: usize = 16 * 1024;

/// The pause after each byte of a reply under [`Mode::Trickle`].
const DRIP: Duration = Duration::from_millis(100);

fn count(traffic: &mut Traffic, bytes: usize) {
    traffic.bytes += bytes as u64;
    traffic.chunks += 1;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Request,
    Reply,
}

impl Mode {
    /// Returns how long after its arrival something goes on; `None` while nothing does.
    fn delay(self, way: Way) -> Option<Duration> {
        match (self, way) {
            (Self::Blackhole | Self::HalfOpen, _) => None,
            (Self::Delay { requests, .. }, Way::Request) => Some(requests),
            (Self::Delay { replies, .. }, Way::Reply) => Some(replies),
            (Self::Pass | Self::DropReplies | Self::Trickle | Self::Refuse, _) => Some(Duration::ZERO),
        }
    }

    fn loses(self, way: Way) -> bool {
        self == Self::DropReplies && way == Way::Reply
    }
}

/// One direction of a connection.
struct Flow<'a> {
    way: Way,
    from: &'a Socket,
    to: &'a Socket,
    shared: &'a Shared,
    out_of_step: &'a AtomicBool,
    buffer: Box<[u8]>,
    held: VecDeque<Arrival>,
    held_bytes: usize,
    /// Nothing has arrived yet.
    at_start: bool,
    /// `from` will send no more.
    at_end: bool,
    /// Made when it is needed first.
    alarm: Option<Alarm>,
}

struct Arrival {
    at: Instant,
    what: What,
}

enum What {
    /// Bytes, and how many of them have been handed on.
    Bytes(Vec<u8>, usize),
    End,
    Failure,
}

impl<'a> Flow<'a> {
    /// The most bytes that are held back, so that a sender that never waits is held up as by a full pipe.
    const MOST_HELD: usize = 16 << 20;

    fn new(
        way: Way,
        from: &'a Socket,
        to: &'a Socket,
        shared: &'a Shared,
        out_of_step: &'a AtomicBool,
    ) -> Self {
        Self {
            way,
            from,
            to,
            shared,
            out_of_step,
            buffer: vec![0; CHUNK].into(),
            held: VecDeque::new(),
            held_bytes: 0,
            at_start: true,
            at_end: false,
            alarm: None,
        }
    }

    /// Hands on until the end of the stream has been handed on.
    async fn run(mut self) -> io::Result<()> {
        let mut mode = self.shared.mode.subscribe();
        loop {
            // Modes are set on this very thread, so that this is the mode until the next await is over.
            let now = *mode.borrow_and_update();
            let delay = now.delay(self.way);
            let due = delay.and_then(|delay| Some(self.held.front()?.at + delay));
            // A socket that nothing is read from holds back all by itself.
            let may_read = delay.is_some() && !self.at_end && self.held_bytes < Self::MOST_HELD;
            if self.alarm.is_none() && due.is_some_and(|due| due > Instant::now()) {
                self.alarm = Some(Alarm::new()?);
            }
            tokio::select! {
                biased;
                changed = mode.changed() => changed.map_err(io::Error::other)?,
                room = writable(self.to, due, self.alarm.as_ref()) => {
                    room?;
                    if self.hand_on(now)? {
                        return Ok(());
                    }
                }
                ready = self.from.stream.readable(), if may_read => {
                    ready?;
                    self.receive();
                }
            }
        }
    }

    /// Takes what has arrived. An end or a reset waits for its turn like everything else.
    fn receive(&mut self) {
        let what = match self.from.stream.try_read(&mut self.buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => What::Failure,
            Ok(0) => What::End,
            Ok(length) => {
                if self.way == Way::Request {
                    self.ask();
                }
                let mut bytes = self.buffer[..length].to_vec();
                if let Some(recording) = &mut *lock(&self.shared.recording) {
                    recording.extend_from_slice(&bytes);
                }
                if mem::take(&mut self.at_start) && self.way == Way::Request {
                    (self.shared.edit)(&mut bytes);
                }
                What::Bytes(bytes, 0)
            }
        };
        match &what {
            What::Bytes(bytes, _) => self.held_bytes += bytes.len(),
            What::End | What::Failure => self.at_end = true,
        }
        let at = Instant::now();
        self.held.push_back(Arrival { at, what });
    }

    /// Counts a round trip if this is the beginning of one.
    fn ask(&self) {
        let mut turn = lock(&self.shared.turn);
        let now = Instant::now();
        let goes_on = match (*turn, *self.shared.mode.borrow()) {
            (Turn::Nobodys, _) => false,
            (Turn::Since(began), Mode::Delay { requests, replies }) => now < began + requests + replies,
            (Turn::Since(_), _) => true,
        };
        if !goes_on {
            *turn = Turn::Since(now);
            lock(&self.shared.counts).round_trips += 1;
        }
    }

    /// Hands on what arrived first, or as much of it as goes; true if that was the end.
    fn hand_on(&mut self, mode: Mode) -> io::Result<bool> {
        let Some(first) = self.held.front_mut() else {
            return Ok(false);
        };
        if mode.loses(self.way) {
            self.out_of_step.store(true, Ordering::Relaxed);
        }
        match &mut first.what {
            What::Bytes(bytes, sent) if mode.loses(self.way) => {
                count(&mut lock(&self.shared.counts).lost, bytes.len() - *sent);
            }
            What::End | What::Failure if mode.loses(self.way) => {}
            What::Bytes(bytes, sent) => {
                // Taken first, so that whoever has received something finds it counted.
                let mut counts = lock(&self.shared.counts);
                let mut rest = &bytes[*sent..];
                if (mode, self.way) == (Mode::Trickle, Way::Reply) {
                    rest = &rest[..1];
                    first.at = Instant::now() + DRIP;
                }
                match self.to.stream.try_write(rest) {
                    Ok(length) => *sent += length,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
                if *sent < bytes.len() {
                    return Ok(false);
                }
                match self.way {
                    Way::Request => count(&mut counts.requests, bytes.len()),
                    Way::Reply => {
                        count(&mut counts.replies, bytes.len());
                        *lock(&self.shared.turn) = Turn::Nobodys;
                    }
                }
            }
            What::End => {
                shutdown(&self.to.stream, Shutdown::Write)?;
                return Ok(true);
            }
            What::Failure => return Err(io::ErrorKind::ConnectionReset.into()),
        }
        if let Some(Arrival {
            what: What::Bytes(bytes, _),
            ..
        }) = self.held.pop_front()
        {
            self.held_bytes -= bytes.len();
        }
        Ok(false)
    }
}

/// Once it is `due` and `socket` takes more. Never if nothing is due.
async fn writable(socket: &Socket, due: Option<Instant>, alarm: Option<&Alarm>) -> io::Result<()> {
    let Some(due) = due else {
        return std::future::pending().await;
    };
    // A piece that is due already needs none.
    if let Some(alarm) = alarm {
        alarm.until(due).await?;
    }
    socket.stream.writable().await
}
