//! The members of the cluster, and the one that is in use.

use std::{sync::Arc, time::Duration};

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

/// The time within which a member has to let the client in, if there are others.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
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
    /// If no member has let the client in in the last round. Each of them is tried again and again.
    pub(crate) async fn connection(&self) -> Result<Connection> {
        let mut state = self.state.clone();
        self.check_runtime()?;
        loop {
            match &*state.borrow_and_update() {
                State::Up(connection) if !connection.has_ended() => return Ok(connection.clone()),
                State::Down(failure) => return Err(failure.clone()),
                State::Up(_) | State::Connecting => {}
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
    loop {
        let before = cluster;
        let mut failure: Option<Failure> = None;
        let mut up = None;
        let mut found = Vec::new();
        let are_most = |found: &[u64], its| {
            let alike = found.iter().filter(|one| **one == its).count();
            alike > hosts.len() / 2
        };
        for _ in 0..hosts.len() {
            let host = &hosts[next];
            next = (next + 1) % hosts.len();
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
                Err(Failure::refused(
                    format!(
                        "{host} is of the cluster {its:x}, and it is not known that most of the {} hosts named are; name the members of \
                         one cluster, most of which have to be there",
                        hosts.len()
                    ),
                    false,
                ))
            });
            match opened {
                Ok(connection) => {
                    up = Some(connection);
                    break;
                }
                Err(error) => {
                    tracing::debug!(host, %error, "a member does not let the client in");
                    failure = Some(match failure.take() {
                        Some(first) => first.or(error),
                        None => error,
                    });
                }
            }
        }
        let most = found.iter().copied().find(|its| are_most(&found, *its));
        if up.is_none() && most.is_some() && most != before {
            // No host that serves is of the cluster that was known, and most are of this one, which has taken its place. Or it is known only
            // since a learner was asked, and those before that were not taken.
            cluster = most;
            continue;
        }
        if let Some(connection) = up {
            state.send_replace(State::Up(connection.clone()));
            connection.ended().await;
            state.send_replace(State::Connecting);
        } else if let Some(failure) = failure {
            state.send_replace(State::Down(failure));
            sleep(PAUSE).await;
        }
    }
}
