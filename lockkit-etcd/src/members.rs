//! The members of the cluster, and the one that is in use.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout},
};

use crate::{
    connection::{Connection, Options},
    error::{Failure, LEARNER, Result},
    wire::Call,
};

/// The time within which a member has to say who it is, and that in which a login is waited for before the next member is tried beside it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time within which a login has to end. A member that has no quorum ends it after some seconds by itself.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a round in which no member let the client in.
const PAUSE: Duration = Duration::from_millis(100);

/// The members, one of which is in use. Dropping it ends the connection.
#[derive(Debug)]
pub(crate) struct Members {
    state: watch::Receiver<State>,
    task: AbortHandle,
    many: usize,
}

#[derive(Clone, Debug)]
enum State {
    Connecting,
    Up(Connection),
    /// No member let the client in so far, and a login goes on that takes its time.
    LoggingIn(Failure),
    /// No member let the client in.
    Down(Failure),
}

impl Members {
    /// Begins to connect. Call it within a Tokio runtime, where the connection lives.
    pub(crate) fn new(hosts: Vec<String>, options: Options) -> Arc<Self> {
        let (sender, state) = watch::channel(State::Connecting);
        let many = hosts.len();
        let task = tokio::spawn(stay_connected(sender, hosts, options));
        Arc::new(Self {
            state,
            task: task.abort_handle(),
            many,
        })
    }

    /// Returns the connection in use.
    ///
    /// # Errors
    /// If no member has let the client in in the last round. Each of them is tried again and again, and a login that takes long goes on:
    /// who has begun something, such as a hold, has to know.
    pub(crate) async fn connection(&self) -> Result<Connection> {
        self.connected(false).await
    }

    /// Returns the connection in use, for those who begin something. Waits also for a login that takes long, for as long as its caller
    /// likes.
    ///
    /// # Errors
    /// If no member has let the client in, and none is about to.
    pub(crate) async fn logged_in(&self) -> Result<Connection> {
        self.connected(true).await
    }

    async fn connected(&self, waits_for_logins: bool) -> Result<Connection> {
        let mut state = self.state.clone();
        self.check_runtime()?;
        loop {
            match &*state.borrow_and_update() {
                State::Up(connection) if !connection.has_ended() => return Ok(connection.clone()),
                State::Down(failure) => return Err(failure.clone()),
                State::LoggingIn(failure) if !waits_for_logins => return Err(failure.clone()),
                State::Up(_) | State::LoggingIn(_) | State::Connecting => {}
            }
            // The task ends with its runtime, or with the client.
            state.changed().await.map_err(|_| Failure::RuntimeGone)?;
        }
    }

    /// Sends a request on the connection in use, and returns the answer. If that connection does not take the request, leaves it and
    /// sends the request on the next one.
    pub(crate) async fn call<C: Call>(&self, request: C) -> Result<C::Answer> {
        loop {
            let connection = self.connection().await?;
            match connection.call(&request).await {
                Err(Failure::Unreachable(_)) => {
                    // A member that shuts down in order keeps it open for as long as there are watches.
                    Self::leave(&connection).await;
                }
                answer => return answer,
            }
        }
    }

    /// Fails if the runtime that the connection lives on has ended.
    pub(crate) fn check_runtime(&self) -> Result<()> {
        // No more can come, and the last connection has ended, too.
        self.state
            .has_changed()
            .map(drop)
            .map_err(|_| Failure::RuntimeGone)
    }

    /// Gives up a connection whose member is silent or cut off, and goes on to another member. Waits until the connection has ended: the
    /// next request would be lost on it.
    pub(crate) async fn leave(connection: &Connection) {
        connection.abort();
        connection.ended().await;
    }

    /// There is another member to go to.
    pub(crate) fn has_others(&self) -> bool {
        self.many > 1
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Keeps a connection to one of the members.
///
/// A host that was set up anew may be a member of another cluster, or a server by itself, and knows nothing of what is held. So the client is
/// of the cluster that most of the hosts named are of, and leaves the others alone.
async fn stay_connected(state: watch::Sender<State>, hosts: Vec<String>, options: Options) {
    // So that the clients do not all begin with the first one.
    let mut next = fastrand::usize(..hosts.len());
    let mut cluster = None;
    // One at each host at most. Cut off, it would begin anew, and take as long and as much of the server again.
    let mut logins = FuturesUnordered::new();
    let mut logs_in = vec![false; hosts.len()];
    loop {
        let before = cluster;
        let mut failure = None;
        let mut up = None;
        let mut found = Vec::new();
        let are_most = |found: &[u64], its| {
            let alike = found.iter().filter(|one| **one == its).count();
            alike > hosts.len() / 2
        };
        for _ in 0..hosts.len() {
            let (at, host) = (next, &hosts[next]);
            next = (next + 1) % hosts.len();
            if logs_in[at] {
                // It is of that one.
                found.extend(cluster);
            } else {
                let opened = timeout(CONNECT_TIMEOUT, Connection::open(host, &options)).await;
                let opened = opened.unwrap_or_else(|_| {
                    Err(Failure::Unreachable(format!(
                        "{host}: no answer within {CONNECT_TIMEOUT:?}"
                    )))
                });
                let opened = opened.and_then(|connection| {
                    let its = connection.cluster();
                    found.push(its);
                    if cluster.is_none() && are_most(&found, its) {
                        cluster = Some(its);
                    }
                    if connection.is_learner() {
                        return Err(Failure::refused(format!("{host}: {LEARNER}"), false));
                    }
                    if cluster == Some(its) {
                        return Ok(connection);
                    }
                    Err(of_another(host, its, hosts.len()))
                });
                match opened {
                    Ok(connection) => {
                        logs_in[at] = true;
                        logins.push(log_in(at, connection));
                    }
                    Err(error) => note(&mut failure, host, error),
                }
            }
            match timeout(CONNECT_TIMEOUT, logins.next()).await {
                Ok(Some((_, Ok(connection)))) => {
                    up = Some(connection);
                    break;
                }
                Ok(Some((at, Err(error)))) => {
                    logs_in[at] = false;
                    note(&mut failure, &hosts[at], error);
                }
                // There is none, or it takes its time.
                Ok(None) | Err(_) => {}
            }
        }
        let most = found.iter().copied().find(|its| are_most(&found, *its));
        let is_another = up.is_none() && most.is_some() && most != before;
        if up.is_some() || is_another && most != cluster {
            logins.clear();
            logs_in.fill(false);
        }
        if is_another {
            // No host that serves is of the cluster that was known, and most are of this one, which has taken its place. Or it is known only
            // since a learner was asked, and those before that were not taken.
            cluster = most;
            continue;
        }
        if let Some(connection) = up {
            state.send_replace(State::Up(connection.clone()));
            connection.ended().await;
            state.send_replace(State::Connecting);
        } else if let Some(slow) = logs_in.iter().position(|logs_in| *logs_in) {
            // A login has half a minute. Not everybody waits for it.
            let reason = format!("no answer to a login within {CONNECT_TIMEOUT:?}; it goes on");
            note(&mut failure, &hosts[slow], Failure::Unreachable(reason));
            if let Some(failure) = failure {
                state.send_replace(State::LoggingIn(failure));
            }
        } else {
            if let Some(failure) = failure {
                state.send_replace(State::Down(failure));
            }
            sleep(PAUSE).await;
        }
    }
}

/// Logs in at the host of this number.
async fn log_in(at: usize, connection: Connection) -> (usize, Result<Connection>) {
    let done = timeout(LOGIN_TIMEOUT, connection.log_in()).await;
    let done = done.unwrap_or_else(|_| {
        let reason = format!("no answer to a login within {LOGIN_TIMEOUT:?}");
        Err(Failure::Unreachable(reason))
    });
    (at, done.map(|()| connection))
}

/// Notes why a member does not let the client in.
fn note(failure: &mut Option<Failure>, host: &str, error: Failure) {
    tracing::debug!(host, %error, "a member does not let the client in");
    *failure = Some(match failure.take() {
        Some(first) => first.or(error),
        None => error,
    });
}

fn of_another(host: &str, cluster: u64, many: usize) -> Failure {
    let reason = format!(
        "{host} is of the cluster {cluster:x}, and it is not known that most of the {many} hosts named are; name the members of one cluster, \
         most of which have to be there"
    );
    Failure::refused(reason, false)
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use lockkit_core::{LockKind, LockName, spi::Backend as _};

    use super::*;
    use crate::{
        EtcdBackend, EtcdConfig,
        config::Credentials,
        rogue::{Answer, serve},
        wire::{AuthenticateResponse, Nothing},
    };

    /// Starts a server that takes so long for a login, or never ends one. Returns its address, and the number of logins.
    async fn takes(long: Option<Duration>) -> (String, Arc<AtomicUsize>) {
        let logins = Arc::new(AtomicUsize::new(0));
        let counted = logins.clone();
        let host = serve(move |request| {
            let logins = counted.clone();
            async move {
                if !request.uri().path().ends_with("Authenticate") {
                    return Answer::of(&Nothing {});
                }
                logins.fetch_add(1, Ordering::SeqCst);
                match long {
                    Some(long) => sleep(long).await,
                    None => pending().await,
                }
                let token = "token".to_owned();
                Answer::of(&AuthenticateResponse { token })
            }
        });
        (host.await, logins)
    }

    fn members(hosts: Vec<String>) -> Arc<Members> {
        let options = Options {
            credentials: Some(Credentials::new("me", "secret")),
            ..Options::default()
        };
        Members::new(hosts, options)
    }

    async fn connects(hosts: Vec<String>) {
        let members = members(hosts);
        let connected = timeout(Duration::from_secs(20), members.logged_in()).await;
        connected.expect("in time").expect("it lets the client in");
    }

    /// It was cut off for the next one, which was cut off, too.
    #[tokio::test]
    async fn a_login_that_takes_long_is_made_once() {
        let (host, logins) = takes(Some(CONNECT_TIMEOUT * 3 / 2)).await;
        connects(vec![host]).await;
        assert_eq!(logins.load(Ordering::SeqCst), 1);
    }

    /// A holder would not be warned for as long as a login may take.
    #[tokio::test]
    async fn who_asks_is_told_while_a_login_hangs() {
        let (host, logins) = takes(None).await;
        let members = members(vec![host]);
        // The second one asks while the login goes on.
        for _ in 0..2 {
            let told = timeout(LOGIN_TIMEOUT / 2, members.connection()).await;
            let failure = told.expect("it waits for the login").unwrap_err();
            assert!(failure.is_refusal() && !failure.is_permanent(), "{failure:?}");
            assert!(failure.to_string().contains("login"), "{failure}");
        }
        assert_eq!(logins.load(Ordering::SeqCst), 1);
    }

    /// It failed as soon as the login had taken two seconds.
    #[tokio::test]
    async fn who_begins_something_waits_for_a_long_login() {
        let (host, logins) = takes(Some(CONNECT_TIMEOUT * 3 / 2)).await;
        let mut config = EtcdConfig::new(host);
        config.auth = Some(Credentials::new("me", "secret"));
        let backend = EtcdBackend::connect(config).await.unwrap();
        let members = &backend.shared.members;
        Members::leave(&members.connection().await.unwrap()).await;
        let failure = members.connection().await.unwrap_err();
        assert!(failure.to_string().contains("login"), "{failure}");
        let name = LockName::new("a").unwrap();
        let seen = backend.inspect(&name, LockKind::Lock).await.unwrap();
        assert!(seen.is_free());
        assert_eq!(logins.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_login_that_never_ends_is_passed_over() {
        let (silent, in_vain) = takes(None).await;
        let (other, logins) = takes(Some(Duration::ZERO)).await;
        // They begin with one of the two by chance.
        for many in 1..=4 {
            connects(vec![silent.clone(), other.clone()]).await;
            assert_eq!(logins.load(Ordering::SeqCst), many);
            assert!(in_vain.load(Ordering::SeqCst) <= many);
        }
    }
}
