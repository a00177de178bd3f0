//! One connection to a member. It does not reconnect by itself.
//!
//! A channel that reconnects or balances by itself hides which member has answered, and that a stream has ended. So each connection
//! is one of HTTP/2 to one member, and [`members`](crate::members) says which one is in use.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _};
use http::uri::PathAndQuery;
use hyper::{
    body::Incoming,
    client::conn::http2::{Builder, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use lockkit_core::spi::{Secrets, Unencrypted};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    runtime::Handle,
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use tonic::{
    Request, Streaming,
    body::Body,
    client::Grpc,
    metadata::{Ascii, MetadataValue},
};

use crate::{
    NAME,
    bounded::{BoundedCodec, BoundedHeaders, CONNECTION_WINDOW, MAX_ANSWER, MAX_HEADERS, STREAM_WINDOW},
    config::Credentials,
    error::{Failure, NO_RIGHT, Result},
    lock,
    wire::{
        AuthenticateRequest, Call, KEEP_ALIVE, LeaseRequest, LeaseResponse, Nothing, REVOKE, StatusResponse,
        TIME_TO_LIVE, WATCH, WatchRequest, WatchResponse,
    },
};

/// A connection on which nothing is asked shows after these that its member is gone. A server minds more than one question in 5 s.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// The first versions, by minor version, in which a leader that comes unstuck ends no lease that was renewed meanwhile.
const SOUND_SINCE: &[(u32, u32)] = &[(4, 31), (5, 13)];
/// Those in which a user's roles bind a transaction within a transaction, too.
const BORDER_SINCE: &[(u32, u32)] = &[(4, 42), (5, 28), (6, 9)];

/// The proof of who a user is.
type Token = MetadataValue<Ascii>;

/// A connection to a member.
#[derive(Clone, Debug)]
pub(crate) struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: String,
    /// The cluster that the member is of, by its number, and whether it is a learner.
    introduced: OnceLock<(u64, bool)>,
    since: Instant,
    grpc: Grpc<Http>,
    credentials: Option<Credentials>,
    secrets: Secrets,
    token: Mutex<Option<Token>>,
    /// Whoever logs in has it.
    login: tokio::sync::Mutex<()>,
    /// The runtime that the connection lives on.
    runtime: Handle,
    /// The time of the last answer that proves the member to be one of a quorum.
    heard: Mutex<Option<Instant>>,
    ended: watch::Receiver<()>,
    task: AbortHandle,
}

impl Connection {
    /// Connects to the member at `host`, and asks who it is. [Log in](Self::log_in) before anything else. Call it within a Tokio runtime: the
    /// connection's task lives there.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub(crate) async fn open(host: &str, options: &Options) -> Result<Self> {
        let opened = Self::open_to(host, options).await;
        opened.map_err(|failure| failure.blanked(&options.secrets))
    }

    async fn open_to(host: &str, options: &Options) -> Result<Self> {
        let unreachable = |error: std::io::Error| Failure::Unreachable(format!("{host}: {error}"));
        let stream = TcpStream::connect(host).await.map_err(unreachable)?;
        // Each request is one small packet.
        let _ = stream.set_nodelay(true);
        let peer = stream.peer_addr().ok();
        #[cfg(feature = "tls")]
        if let Some(trust) = &options.trust {
            let stream = trust.shake_hands(host, stream).await?;
            let fault = stream.fault();
            let opened = Self::over(stream, host, "https", options).await;
            return opened.map_err(|failure| fault.get().cloned().unwrap_or(failure));
        }
        if options.credentials.is_some() {
            options.unencrypted.note(NAME, host, peer, "tls=verify");
        }
        Self::over(stream, host, "http", options).await
    }

    async fn over<S>(stream: S, host: &str, scheme: &str, options: &Options) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let origin = format!("{scheme}://{host}");
        let origin = origin
            .parse()
            .map_err(|_| Failure::refused(format!("{host:?} is no host"), true))?;
        let shaken = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_HEADERS)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake::<_, Body>(TokioIo::new(BoundedHeaders::new(stream)))
            .await;
        let (sender, work) =
            shaken.map_err(|error| Failure::Unreachable(format!("{host}: {}", chain(&error))))?;
        let (alive, ended) = watch::channel(());
        let (name, secrets) = (host.to_owned(), options.secrets.clone());
        let task = tokio::spawn(async move {
            // The receivers see its drop, also if the task is aborted.
            let _alive = alive;
            if let Err(error) = work.await {
                let error = secrets.chain(&error);
                tracing::debug!(host = name, error, "the connection to a member is lost");
            }
        });
        let grpc = Grpc::with_origin(Http(sender), origin).max_decoding_message_size(MAX_ANSWER);
        let connection = Self(Arc::new(Inner {
            host: host.to_owned(),
            introduced: OnceLock::new(),
            since: Instant::now(),
            grpc,
            credentials: options.credentials.clone(),
            secrets: options.secrets.clone(),
            token: Mutex::default(),
            login: tokio::sync::Mutex::default(),
            runtime: Handle::current(),
            heard: Mutex::default(),
            ended,
            task: task.abort_handle(),
        }));
        match connection.introduce(options).await {
            Ok(()) => Ok(connection),
            // It may have closed it since it cannot read what is not encrypted.
            Err(Failure::Unknown(reason) | Failure::Unreachable(reason)) if scheme == "http" => {
                // How it ended differs from time to time, and says nothing of the server.
                let reason = if reason.starts_with("the connection") {
                    "the connection ended before etcd had answered"
                } else {
                    &reason
                };
                let reason = format!("{reason}; if the servers listen on https, connect with tls=verify");
                Err(Failure::Unreachable(format!("{host}: {reason}")))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Returns when the connection began.
    pub(crate) fn since(&self) -> Instant {
        self.0.since
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.ended.has_changed().is_err()
    }

    /// Waits until the connection has ended.
    pub(crate) async fn ended(&self) {
        // The value never changes; an error says that the sender is gone.
        let _ = self.0.ended.clone().changed().await;
    }

    /// The member has given an answer since then that needed a quorum. One that is cut off gives none, but goes on to answer keepalives.
    pub(crate) fn heard_since(&self, at: Instant) -> bool {
        lock(&self.0.heard).is_some_and(|heard| heard >= at)
    }

    /// Ends the connection, and with it every request on it.
    pub(crate) fn abort(&self) {
        self.0.task.abort();
    }

    pub(crate) fn secrets(&self) -> &Secrets {
        &self.0.secrets
    }

    pub(crate) fn has_user(&self) -> bool {
        self.0.credentials.is_some()
    }

    /// Gets a token for the user, if there is one. Servers take their time for that, on purpose.
    pub(crate) async fn log_in(&self) -> Result<()> {
        if self.has_user() {
            self.renew_token(None).await?;
        }
        Ok(())
    }

    async fn authenticate(&self) -> Result<()> {
        let Some(Credentials { user, password }) = self.0.credentials.clone() else {
            return Ok(());
        };
        let request = AuthenticateRequest { name: user, password };
        // As it reads where the password is one of these words.
        let nobody_is_asked = self.0.secrets.blank("authentication is not enabled");
        let answer = match self.unary_with(None, AuthenticateRequest::PATH, request).await {
            Err(Failure::Refused { reason, .. }) if reason.contains(&*nobody_is_asked) => {
                tracing::warn!(
                    "the servers ask nobody for a password, so that the user and password are of no use"
                );
                return Ok(());
            }
            answer => answer?,
        };
        let answer: <AuthenticateRequest as Call>::Answer = answer;
        let token = MetadataValue::try_from(answer.token)
            .map_err(|_| Failure::refused("the servers returned a token that cannot be sent", true))?;
        *lock(&self.0.token) = Some(token);
        Ok(())
    }

    /// Returns the number of the cluster that the member is of.
    pub(crate) fn cluster(&self) -> u64 {
        self.0.introduced.get().map_or(0, |(cluster, _)| *cluster)
    }

    /// The member was a learner when the connection began: it only caught up with the others, and served nobody.
    pub(crate) fn is_learner(&self) -> bool {
        self.0.introduced.get().is_some_and(|(_, is_learner)| *is_learner)
    }

    /// Asks who the member is. Warns of a version on which the promises have a gap.
    async fn introduce(&self, options: &Options) -> Result<()> {
        // As it reads where the password is a part of it.
        let no_right = self.0.secrets.blank(NO_RIGHT);
        let status = match self.call(&Nothing {}).await {
            // Some versions tell `root` alone. Each user learns of which cluster it is by the answer that there is no such lease.
            Err(Failure::Refused { reason, .. }) if reason.contains(&*no_right) => {
                let lease: LeaseResponse = self.unary(TIME_TO_LIVE, &LeaseRequest { id: -1 }).await?;
                StatusResponse {
                    header: lease.header,
                    ..StatusResponse::default()
                }
            }
            status => status?,
        };
        let cluster = status.header.map_or(0, |header| header.cluster_id);
        self.0.introduced.get_or_init(|| (cluster, status.is_learner));
        let version = &*self.0.secrets.blank(&status.version);
        if is_before(&status.version, SOUND_SINCE) {
            tracing::warn!(
                host = self.0.host,
                version,
                "a leader of this version that was stuck may end leases that were renewed meanwhile, and a holder is told of that \
                 only afterwards; 3.4.31 and 3.5.13 are sound"
            );
        }
        if self.has_user()
            && is_before(&status.version, BORDER_SINCE)
            && !options.has_warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                host = self.0.host,
                version,
                "roles are no border in this version: any user reaches all keys by a transaction within a transaction \
                 (CVE-2026-33343); 3.4.42, 3.5.28 and 3.6.9 have mended that"
            );
        }
        Ok(())
    }

    /// Sends a request, and returns the answer.
    pub(crate) async fn call<C: Call>(&self, request: &C) -> Result<C::Answer> {
        let answer = self.unary(C::PATH, request).await?;
        if C::IS_LINEARIZABLE {
            *lock(&self.0.heard) = Some(Instant::now());
        }
        Ok(answer)
    }

    /// Revokes a lease, and with it deletes all its keys. One that is not there is no failure.
    pub(crate) async fn revoke(&self, lease: i64) -> Result<()> {
        match self
            .unary::<_, Nothing>(REVOKE, &LeaseRequest { id: lease })
            .await
        {
            Ok(_) | Err(Failure::NoLease) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Returns what is left of the lease of a key, in seconds; `None` for a key that has none, and so has no end. Nothing is left of a lease
    /// that is not there.
    pub(crate) async fn time_to_live(&self, lease: i64) -> Result<Option<u64>> {
        if lease == 0 {
            return Ok(None);
        }
        let answer: LeaseResponse = self.unary(TIME_TO_LIVE, &LeaseRequest { id: lease }).await?;
        Ok(Some(u64::try_from(answer.ttl).unwrap_or(0)))
    }

    /// Renews a lease. The answer alone proves nothing.
    pub(crate) async fn keep_alive(&self, lease: i64) -> Result<LeaseResponse> {
        let token = self.token();
        match self.keep_alive_once(lease).await {
            Err(Failure::StaleToken) => {
                self.renew_token(token.as_ref()).await?;
                self.keep_alive_once(lease).await
            }
            answer => answer,
        }
    }

    async fn keep_alive_once(&self, lease: i64) -> Result<LeaseResponse> {
        let requests = futures_util::stream::iter([LeaseRequest { id: lease }]);
        let mut answers = self.stream(KEEP_ALIVE, requests).await?;
        let answer = async {
            match answers.next().await {
                Some(answer) => Ok(answer?),
                None => Err(Failure::Unknown(
                    "the member ended the stream of keepalives".to_owned(),
                )),
            }
        };
        self.until_ended(answer).await
    }

    /// Opens the stream of watches. It is open once the server has answered something.
    pub(crate) async fn watches(
        &self,
        requests: impl Stream<Item = WatchRequest> + Send + 'static,
    ) -> Result<Streaming<WatchResponse>> {
        self.stream(WATCH, requests).await
    }

    async fn unary<M, A>(&self, path: &'static str, message: &M) -> Result<A>
    where
        M: Message + Default + Clone + 'static,
        A: Message + Default + 'static,
    {
        let token = self.token();
        match self.unary_with(token.clone(), path, message.clone()).await {
            // It was refused, so that it may be repeated.
            Err(Failure::StaleToken) => {
                self.renew_token(token.as_ref()).await?;
                self.unary_with(self.token(), path, message.clone()).await
            }
            answer => answer,
        }
    }

    /// Gets another token, since a request was refused with this one, or without. Of many that were, one logs in. Returns `false` if another
    /// one has done so.
    pub(crate) async fn renew_token(&self, refused: Option<&Token>) -> Result<bool> {
        if !self.has_user() {
            let reason = "the servers ask for a user; name one in the URL, as in etcd://user:password@host";
            return Err(Failure::refused(reason, true));
        }
        let (connection, refused) = (self.clone(), refused.cloned());
        // In a task that ends with this future: one that is neither polled nor dropped is in nobody's way.
        let mut login = JoinSet::new();
        let logging_in = async move {
            let _logging_in = connection.0.login.lock().await;
            if connection.token() != refused {
                return Ok(false);
            }
            connection.authenticate().await?;
            Ok(true)
        };
        login.spawn_on(logging_in, &self.0.runtime);
        match login.join_next().await {
            Some(Ok(done)) => done,
            _ => Err(Failure::RuntimeGone),
        }
    }

    async fn unary_with<M, A>(&self, token: Option<Token>, path: &'static str, message: M) -> Result<A>
    where
        M: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = BoundedCodec::<M, A>::for_one();
        let request = request(token, message);
        let answer = grpc.unary(request, PathAndQuery::from_static(path), codec);
        let answer = self.until_ended(async { Ok(answer.await?) }).await?;
        Ok(answer.into_inner())
    }

    async fn stream<M, A, S>(&self, path: &'static str, messages: S) -> Result<Streaming<A>>
    where
        M: Message + Default + 'static,
        A: Message + Default + 'static,
        S: Stream<Item = M> + Send + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = BoundedCodec::<M, A>::for_many();
        let mut request = request(self.token(), messages);
        // The stream of a member that has no leader is ended, rather than silent.
        let metadata = request.metadata_mut();
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        let answers = grpc.streaming(request, PathAndQuery::from_static(path), codec);
        let answers = self.until_ended(async { Ok(answers.await?) }).await?;
        Ok(answers.into_inner())
    }

    /// Waits for an answer, for as long as the connection is there. A request that is under way does not end with the connection's
    /// task.
    async fn until_ended<T>(&self, answer: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            answer = answer => answer.map_err(|failure| failure.blanked(&self.0.secrets)),
            () = self.ended() => Err(Failure::Unknown("the connection was given up or lost".to_owned())),
        }
    }

    async fn grpc(&self) -> Result<Grpc<Http>> {
        let mut grpc = self.0.grpc.clone();
        match grpc.ready().await {
            Ok(()) => Ok(grpc),
            Err(error) => Err(Failure::Unreachable(format!(
                "{}: {}",
                self.0.host,
                chain(&error)
            ))),
        }
    }

    pub(crate) fn token(&self) -> Option<Token> {
        lock(&self.0.token).clone()
    }
}

fn request<T>(token: Option<Token>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The options for each connection.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) credentials: Option<Credentials>,
    pub(crate) secrets: Secrets,
    pub(crate) unencrypted: Unencrypted,
    /// The client was told that roles are no border.
    pub(crate) has_warned: Arc<AtomicBool>,
    #[cfg(feature = "tls")]
    pub(crate) trust: Option<crate::tls::Trust>,
}

/// Returns whether a version is before the first one that is mended, by its minor version. What is no version is not.
fn is_before(version: &str, mended: &[(u32, u32)]) -> bool {
    let mut numbers = version.split(['.', '-', '+']).map(|number| number.parse().ok());
    let (Some(3), Some(minor), Some(patch)) = (
        numbers.next().flatten(),
        numbers.next().flatten(),
        numbers.next().flatten(),
    ) else {
        return false;
    };
    let since = mended.iter().find(|(mended, _)| *mended >= minor);
    since.is_some_and(|since| (minor, patch) < *since)
}

/// Returns an error and its causes.
fn chain(error: &hyper::Error) -> String {
    lockkit_core::spi::chain(error)
}

/// A connection of HTTP/2, as tonic takes it.
#[derive(Clone, Debug)]
struct Http(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Http {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::atomic::AtomicUsize};

    use futures_util::{FutureExt as _, future::join_all};
    use hyper::{
        body::{Bytes, Frame},
        server,
        service::service_fn,
    };
    use lockkit_conformance::Traces;
    use lockkit_testbed::{
        Mode, Proxy,
        etcd::{self, EtcdServer},
    };
    use tokio::{net::TcpListener, time::timeout};

    use super::*;
    use crate::{
        rogue::{Answer, serve},
        wire::{AuthenticateResponse, Header, LeaseGrantRequest, RangeRequest},
    };

    /// An empty answer, again and again.
    struct Again;

    impl hyper::body::Body for Again {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 5])))))
        }
    }

    /// Whoever waits for the last one takes what the member sends for as long as it likes.
    #[tokio::test]
    async fn a_second_answer_to_one_request_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let answers = service_fn(async |_: http::Request<Incoming>| {
                let answer = http::Response::builder()
                    .header("content-type", "application/grpc")
                    .body(Again);
                Ok::<_, Infallible>(answer.expect("an answer"))
            });
            let serving = server::conn::http2::Builder::new(TokioExecutor::new());
            let _ = serving.serve_connection(TokioIo::new(client), answers).await;
        });
        let options = Options::default();
        let opened = timeout(Duration::from_secs(20), Connection::open(&host, &options)).await;
        let failure = opened.expect("it does not wait for the last one").unwrap_err();
        assert!(failure.to_string().contains("more than once"), "{failure}");
    }

    /// Returns a connection whose first token has ended, and the number of logins that have begun.
    async fn with_an_ended_token() -> (Connection, Arc<AtomicUsize>) {
        let logins = Arc::new(AtomicUsize::new(0));
        let counted = logins.clone();
        let host = serve(move |request| {
            let logins = counted.clone();
            let asks_for = |method: &str| request.uri().path().ends_with(method);
            let (is_login, is_status) = (asks_for("Authenticate"), asks_for("Status"));
            // The first token has ended.
            let is_in = request.headers().get("token").is_some_and(|token| token == "2");
            async move {
                if is_login {
                    let number = logins.fetch_add(1, Ordering::SeqCst) + 1;
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    let token = number.to_string();
                    return Answer::of(&AuthenticateResponse { token });
                }
                if is_status || is_in {
                    return Answer::of(&Nothing {});
                }
                Answer::refusal("16", "etcdserver: invalid auth token")
            }
        });
        let options = Options {
            credentials: Some(Credentials::new("me", "secret")),
            ..Options::default()
        };
        let connection = Connection::open(&host.await, &options).await.unwrap();
        connection.log_in().await.unwrap();
        (connection, logins)
    }

    /// A login is made to take a server's time.
    #[tokio::test]
    async fn many_whose_token_has_ended_log_in_once() {
        let (connection, logins) = with_an_ended_token().await;
        let read = RangeRequest::default();
        let answers = join_all((0..20).map(|_| connection.call(&read))).await;
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        assert_eq!(logins.load(Ordering::SeqCst), 2);
    }

    /// The heartbeats of all leases would wait for whoever has begun one, and does something else.
    #[tokio::test]
    async fn a_login_goes_on_while_who_asked_for_it_is_not_polled() {
        let (connection, logins) = with_an_ended_token().await;
        let read = RangeRequest::default();
        let mut idle = Box::pin(connection.call(&read));
        while logins.load(Ordering::SeqCst) < 2 {
            assert!(idle.as_mut().now_or_never().is_none(), "it has logged in already");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let other = timeout(Duration::from_secs(20), connection.call(&read)).await;
        other.expect("it waits for the idle one").unwrap();
        idle.await.unwrap();
        assert_eq!(logins.load(Ordering::SeqCst), 2);
    }

    /// Else a deletion hangs until the ping gives up, while its session goes on elsewhere and renews the lease of the key.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_connection_given_up_ends_its_requests() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let proxy = Proxy::start(server.addr()).unwrap();
        let options = Options::default();
        let connection = Connection::open(&proxy.addr().to_string(), &options).await;
        let connection = connection.unwrap();
        proxy.set(Mode::Blackhole);
        let read = RangeRequest {
            key: b"key".into(),
            ..RangeRequest::default()
        };
        let (asked, given_up) = (connection.clone(), connection.clone());
        let (read, renewed, ()) = tokio::join!(
            timeout(Duration::from_mins(1), connection.call(&read)),
            timeout(Duration::from_mins(1), asked.keep_alive(1)),
            async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                given_up.abort();
            },
        );
        assert!(matches!(read, Ok(Err(Failure::Unknown(_)))), "{read:?}");
        assert!(matches!(renewed, Ok(Err(Failure::Unknown(_)))), "{renewed:?}");
    }

    /// It would be shown as a hold without an end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_is_left_of_a_lease_that_is_not_there() {
        if lockkit_testbed::skipped("etcd", etcd::missing()) {
            return;
        }
        let server = tokio::task::block_in_place(EtcdServer::plain).unwrap();
        let connection = Connection::open(&server.addr().to_string(), &Options::default()).await;
        let connection = connection.unwrap();
        let granted = connection.call(&LeaseGrantRequest { ttl: 60 }).await.unwrap();
        let left = connection.time_to_live(granted.id).await.unwrap();
        assert!(left.is_some_and(|left| (50..=60).contains(&left)), "{left:?}");
        connection.revoke(granted.id).await.unwrap();
        assert_eq!(connection.time_to_live(granted.id).await.unwrap(), Some(0));
        assert_eq!(
            connection.time_to_live(0).await.unwrap(),
            None,
            "a key without one"
        );
    }

    #[test]
    fn versions_with_a_gap_are_known() {
        for version in ["3.3.27", "3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.5.0-rc.1"] {
            assert!(is_before(version, SOUND_SINCE), "{version}");
        }
        for version in ["3.4.31", "3.5.13", "3.5.30", "3.6.0", "4.0.0", "", "new"] {
            assert!(!is_before(version, SOUND_SINCE), "{version}");
        }
        for version in ["3.3.27", "3.4.41", "3.5.27", "3.6.0", "3.6.8"] {
            assert!(is_before(version, BORDER_SINCE), "{version}");
        }
        for version in ["3.4.42", "3.5.28", "3.6.9", "3.7.0", ""] {
            assert!(!is_before(version, BORDER_SINCE), "{version}");
        }
    }

    #[tokio::test]
    async fn a_user_is_warned_once_where_roles_are_no_border() {
        for (has_user, expected) in [(true, 1), (false, 0)] {
            let host = serve(|_| async {
                Answer::of(&StatusResponse {
                    version: "3.5.27".to_owned(),
                    ..StatusResponse::default()
                })
            });
            let host = host.await;
            let options = Options {
                credentials: has_user.then(|| Credentials::new("me", "secret")),
                ..Options::default()
            };
            let traces = Traces::default();
            let _recording = tracing::subscriber::set_default(traces.clone());
            for _ in 0..2 {
                Connection::open(&host, &options).await.unwrap();
            }
            let text = traces.text();
            assert_eq!(text.matches("roles are no border").count(), expected, "{text}");
        }
    }

    /// As those from 3.6.0 to 3.6.11.
    #[tokio::test]
    async fn a_member_may_say_who_it_is_to_root_alone() {
        let host = serve(|request| {
            let asks_for = |method: &str| request.uri().path().ends_with(method);
            let (is_login, is_status) = (asks_for("Authenticate"), asks_for("Status"));
            let is_about_a_lease = asks_for("LeaseTimeToLive");
            let is_in = request.headers().contains_key("token");
            async move {
                if is_login {
                    let token = "1".to_owned();
                    return Answer::of(&AuthenticateResponse { token });
                }
                if !is_in {
                    return Answer::refusal("3", "etcdserver: user name is empty");
                }
                if is_status {
                    return Answer::refusal("7", "etcdserver: permission denied");
                }
                if is_about_a_lease {
                    let header = Header {
                        cluster_id: 7,
                        ..Header::default()
                    };
                    return Answer::of(&LeaseResponse {
                        header: Some(header),
                        id: -1,
                        ttl: -1,
                    });
                }
                Answer::of(&Nothing {})
            }
        });
        let options = Options {
            credentials: Some(Credentials::new("me", "secret")),
            ..Options::default()
        };
        let connection = Connection::open(&host.await, &options).await.unwrap();
        assert_eq!(connection.cluster(), 7);
        assert!(!connection.is_learner());
        connection.log_in().await.unwrap();
        connection.call(&RangeRequest::default()).await.unwrap();
    }
}
