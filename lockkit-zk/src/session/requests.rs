//! The requests that claims and backend make on a session.

use std::{iter::successors, sync::atomic::Ordering};

use futures_util::future::{OptionFuture, join_all};
use lockkit_core::spi::queue::AbandonWatch;
use zookeeper_client::{
    Acl, Acls, CreateMode, CreateOptions, CreateSequence, Error as ZkError, MultiReadResult, MultiWriteError,
    MultiWriteResult, OneshotWatcher, Stat,
};

use super::{Core, heartbeat::recent_holds};
use crate::{
    Access, Parents, ZkConfig,
    connection::Connection,
    error::{Failure, Result},
    layout::{NodeRef, basename, parent},
    watch::Watch,
};

/// A node's data and state.
pub(crate) type NodeState = (Vec<u8>, Stat);

/// The options that nodes are made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeOptions {
    acls: Acls<'static>,
    parents: CreateMode,
}

/// A sequential node that has been made.
#[derive(Debug)]
pub(crate) struct Enqueued {
    pub(crate) path: String,
    pub(crate) sequence: i64,
    pub(crate) czxid: i64,
    /// The number of others in the directory, all of them before it; `None` if the request did not ask.
    pub(crate) others: Option<usize>,
    /// The prefix of the node that lockkit made there before it, if the request asked and nothing else is in its place.
    pub(crate) last_prefix: Option<String>,
}

/// A node that was looked for and found.
#[derive(Clone, Debug)]
pub(crate) struct FoundNode {
    pub(crate) path: String,
    pub(crate) czxid: i64,
}

/// The result of a look, and the watch that was set with it.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) found: Vec<String>,
    pub(crate) watch: Watch,
}

/// The transactions of a node that is not there.
const NOT_THERE: (i64, i64) = (0, 0);

impl Enqueued {
    /// A node that was made by a request that did not ask about others.
    fn unseen(prefix: &str, (stat, sequence): (Stat, CreateSequence)) -> Self {
        Self {
            path: format!("{prefix}{sequence}"),
            sequence: sequence.into_i64(),
            czxid: stat.czxid,
            others: None,
            last_prefix: None,
        }
    }
}

impl NodeOptions {
    pub(super) fn new(config: &ZkConfig) -> Self {
        Self {
            acls: match config.access() {
                Access::Everyone => Acls::anyone_all(),
                Access::Creator => Acls::creator_all(),
            },
            parents: match config.parents {
                Parents::Container => CreateMode::Container,
                Parents::Persistent => CreateMode::Persistent,
            },
        }
    }

    pub(super) fn contender(&self, mode: CreateMode) -> CreateOptions<'static> {
        mode.with_acls(self.acls)
    }

    fn directory(&self) -> CreateOptions<'static> {
        self.parents.with_acls(self.acls)
    }
}

impl Core {
    /// Makes a sequential node and asks, in the same request, whether it is alone.
    ///
    /// A transaction makes the node and writes the directory. The reply has the directory's state: the number of its nodes,
    /// and as its last change the id of the transaction, which is the new node's `czxid`. It writes the prefix of the node's
    /// name, for the newcomer after it. If `asks_for_last`, it reads that of the newcomer before, in a request sent before and
    /// together with the transaction. The transaction also makes so many directories as are `missing`: servers do not remove
    /// a container that never had a child.
    pub(crate) async fn enqueue(
        &self,
        abandon_watch: &AbandonWatch<NodeRef>,
        prefix: &str,
        data: &[u8],
        missing: usize,
        asks_for_last: bool,
    ) -> Result<std::result::Result<Enqueued, ZkError>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let mut writer = client.new_multi_writer();
        let options = self.node_options.contender(CreateMode::EphemeralSequential);
        let above = successors(Some(parent(prefix)), |dir| Some(parent(dir)));
        let missing: Vec<_> = above.take(missing).collect();
        for dir in missing.iter().rev() {
            writer.add_create(dir, b"", &self.node_options.directory())?;
        }
        writer.add_create(prefix, data, &options)?;
        writer.add_set_data(parent(prefix), basename(prefix).as_bytes(), None)?;
        let last = asks_for_last.then(|| client.get_data(parent(prefix)));
        let committed = abandon_watch.send(|| writer.commit())?;
        let (last, committed) = tokio::join!(OptionFuture::from(last), committed);
        let error = match committed {
            Ok(results) => match &results[..] {
                [
                    ..,
                    MultiWriteResult::Create { path, .. },
                    MultiWriteResult::SetData { stat },
                ] => {
                    let sequence = path.get(prefix.len()..).and_then(|number| number.parse().ok());
                    let sequence = sequence.ok_or_else(|| {
                        ZkError::UnexpectedError(format!("the server made {path} for {prefix}"))
                    })?;
                    return Ok(Ok(Enqueued {
                        path: path.clone(),
                        sequence,
                        czxid: stat.mzxid,
                        others: usize::try_from(stat.num_children - 1).ok(),
                        last_prefix: last.and_then(|last| prefix_in(last.ok()?.0)),
                    }));
                }
                _ => ZkError::UnexpectedError("a transaction had too few results".to_owned()),
            },
            // The directory may not be written: do without, and without knowing the number of others.
            Err(MultiWriteError::OperationFailed {
                index: 1,
                source: ZkError::NoAuth,
            }) if missing.is_empty() => {
                let made = abandon_watch
                    .send(|| client.create(prefix, data, &options))?
                    .await;
                return Ok(made.map(|made| Enqueued::unseen(prefix, made)));
            }
            Err(
                MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source },
            ) => source,
        };
        Ok(Err(error))
    }

    /// Makes a sequential node and lists the directory, in two requests sent together.
    pub(crate) async fn enqueue_and_list(
        &self,
        abandon_watch: &AbandonWatch<NodeRef>,
        prefix: &str,
        data: &[u8],
    ) -> Result<(std::result::Result<Enqueued, ZkError>, Result<Vec<String>>)> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let options = self.node_options.contender(CreateMode::EphemeralSequential);
        let made = abandon_watch.send(|| client.create(prefix, data, &options))?;
        let (made, children) = tokio::join!(made, client.list_children(parent(prefix)));
        Ok((made.map(|made| Enqueued::unseen(prefix, made)), listed(children)))
    }

    /// Makes an ephemeral node.
    pub(crate) async fn create(
        &self,
        abandon_watch: &AbandonWatch<NodeRef>,
        path: &str,
        data: &[u8],
    ) -> Result<std::result::Result<Stat, ZkError>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let options = self.node_options.contender(CreateMode::Ephemeral);
        let created = abandon_watch.send(|| client.create(path, data, &options))?.await;
        Ok(created.map(|(stat, _)| stat))
    }

    /// Makes an ephemeral node in the place of another one, if that was not written since it had this version. Returns the
    /// transaction, which also writes the other node before it deletes it.
    pub(crate) async fn replace(
        &self,
        abandon_watch: &AbandonWatch<NodeRef>,
        old: &str,
        version: i32,
        new: &str,
        data: &[u8],
    ) -> Result<std::result::Result<i64, ZkError>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let options = self.node_options.contender(CreateMode::Ephemeral);
        let mut writer = client.new_multi_writer();
        writer.add_set_data(old, data, Some(version))?;
        writer.add_create(new, data, &options)?;
        writer.add_delete(old, None)?;
        let committed = abandon_watch.send(|| writer.commit())?.await;
        Ok(match committed {
            Ok(results) => match &results[..] {
                [MultiWriteResult::SetData { stat }, ..] => Ok(stat.mzxid),
                _ => Err(ZkError::UnexpectedError(
                    "a transaction had too few results".to_owned(),
                )),
            },
            Err(
                MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source },
            ) => Err(source),
        })
    }

    /// Makes a directory and those above it.
    pub(crate) async fn make_directory(&self, path: &str) -> Result<()> {
        let connection = self.connection().await?;
        self.make_directory_on(&connection, path).await
    }

    pub(super) async fn make_directory_on(&self, connection: &Connection, path: &str) -> Result<()> {
        connection
            .client
            .mkdir(path, &self.node_options.directory())
            .await?;
        Ok(())
    }

    /// Returns who may do what to a node; `None` if it is missing, or this client may not know.
    pub(crate) async fn acl(&self, path: &str) -> Result<Option<Vec<Acl>>> {
        let connection = self.connection().await?;
        match connection.client.get_acl(path).await {
            Ok((acl, _)) => Ok(Some(acl)),
            Err(ZkError::NoNode | ZkError::NoAuth) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a node; `false` if there is none.
    pub(crate) async fn delete(&self, path: &str) -> Result<bool> {
        let connection = self.connection().await?;
        deleted(connection.client.delete(path, None).await)
    }

    /// Writes a node; `false` if there is none.
    pub(crate) async fn write(&self, path: &str, data: &[u8]) -> Result<bool> {
        let connection = self.connection().await?;
        let written = connection.client.set_data(path, data, None).await;
        Ok(unless_missing(written)?.is_some())
    }

    /// Deletes a claim's node, unless that was taken away: another claim's may be there by now. `false` if there is none. Notes when the
    /// request has been `sent`: who is dropped while it waits for a connection has asked for nothing.
    pub(crate) async fn delete_own(
        &self,
        abandon_watch: &AbandonWatch<NodeRef>,
        path: &str,
        sent: &mut bool,
    ) -> Result<bool> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let deleting = abandon_watch.send(|| client.delete(path, None))?;
        *sent = true;
        deleted(deleting.await)
    }

    /// Deletes the node of a hold and announces in the same transaction, for [its waiter](Self::was_held), that it was a hold;
    /// `false` if there is none. Notes when the request has been `sent`.
    pub(crate) async fn delete_held(&self, path: &str, czxid: i64, sent: &mut bool) -> Result<bool> {
        let data = self.heartbeat_data_with(czxid);
        let connection = self.connection().await?;
        let client = &connection.client;
        let mut writer = client.new_multi_writer();
        writer.add_set_data(&self.heartbeat_path, data.as_bytes(), None)?;
        writer.add_delete(path, None)?;
        let deleting = writer.commit();
        *sent = true;
        match deleting.await {
            Ok(_) => Ok(true),
            Err(MultiWriteError::OperationFailed {
                index: 1,
                source: ZkError::NoNode,
            }) => Ok(false),
            // The session's node cannot be written.
            Err(MultiWriteError::OperationFailed { .. }) => self.delete(path).await,
            Err(MultiWriteError::RequestFailed { source }) => Err(source.into()),
        }
    }

    /// Returns whether the session that writes to `heartbeat_path` says that it held the node that transaction `czxid` made,
    /// and the node at `own` is there. `false` proves neither wrong.
    pub(crate) async fn was_held(&self, heartbeat_path: &str, czxid: i64, own: &str) -> Result<bool> {
        if self.lacks_multi_read.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let connection = self.connection().await?;
        let mut reader = connection.client.new_multi_reader();
        reader.add_get_data(heartbeat_path)?;
        reader.add_get_data(own)?;
        let read = match reader.commit().await {
            // An older server closes the connection upon such a request, so it is asked once.
            Err(ZkError::Unimplemented) => {
                self.lacks_multi_read.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            read => read?,
        };
        Ok(match &read[..] {
            [MultiReadResult::Data { data, .. }, MultiReadResult::Data { .. }] => {
                recent_holds(data).any(|hold| hold == czxid)
            }
            // One of them may not be read, or has gone.
            _ => false,
        })
    }

    /// Lists a directory, as far as the connected server knows. Without a directory the list is empty.
    pub(crate) async fn list(&self, dir: &str) -> Result<Vec<String>> {
        let connection = self.connection().await?;
        listed(self.distance.measure(connection.client.list_children(dir)).await)
    }

    /// Lists a directory, as far as the connected server knows, as one of many requests at once. So it does not tell how far that
    /// server is.
    pub(crate) async fn children(&self, dir: &str) -> Result<Vec<String>> {
        let connection = self.connection().await?;
        connection.reply(listed(connection.client.list_children(dir).await))
    }

    /// Lists a directory, with everything that was done before the call.
    pub(crate) async fn list_latest(&self, dir: &str) -> Result<Vec<String>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        // Sent together: the server handles them in order.
        let (synced, children) = (client.sync(dir), client.list_children(dir));
        let (synced, children) = tokio::join!(synced, children);
        connection.reply(synced.map_err(Into::into))?;
        connection.reply(listed(children))
    }

    /// Reads a node's data and state, with everything that was done before the call.
    pub(crate) async fn read_latest(&self, path: &str) -> Result<Option<NodeState>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let (synced, read) = (client.sync(path), client.get_data(path));
        let (synced, read) = tokio::join!(synced, read);
        synced?;
        Ok(unless_missing(read)?)
    }

    /// Reads the data and states of several nodes; `None` for one that is not there.
    pub(crate) async fn read_all(&self, paths: &[String]) -> Result<Vec<Option<NodeState>>> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let replies = join_all(paths.iter().map(|path| client.get_data(path))).await;
        let read = paths.iter().zip(replies);
        read.map(|(path, reply)| unless_missing(reply).map_err(|error| Failure::from(error).about(path)))
            .collect()
    }

    /// Returns whether all of these nodes are there.
    pub(crate) async fn are_there(&self, paths: &[String]) -> Result<bool> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let replies = join_all(paths.iter().map(|path| client.check_stat(path))).await;
        let mut all = true;
        for reply in replies {
            all &= reply?.is_some();
        }
        Ok(all)
    }

    /// Reads several nodes and watches them for their deletion; `None` for one that is not there.
    pub(crate) async fn watch_all(&self, paths: &[String]) -> Result<Vec<Option<(Vec<u8>, Stat, Watch)>>> {
        let connection = self.connection().await?;
        let requests = join_all(
            paths
                .iter()
                .map(|path| connection.client.get_and_watch_data(path)),
        );
        let replies = self.distance.measure(requests).await;
        let watched = |(path, reply): (&String, _)| {
            let found = unless_missing(reply)?;
            Ok(found.map(|(data, stat, watcher)| {
                let watch = Watch::new(path.clone(), &stat, watcher, connection.liveness());
                self.keep_armed(watch.state());
                (data, stat, watch)
            }))
        };
        paths.iter().zip(replies).map(watched).collect()
    }

    /// Lists a directory, with everything that was done before the call, and watches it. Without a directory the list is empty, and
    /// the watch waits for one.
    pub(crate) async fn watch_children(&self, dir: &str) -> Result<Watched> {
        let connection = self.connection().await?;
        let client = &connection.client;
        loop {
            let (synced, listed) = tokio::join!(client.sync(dir), client.get_and_watch_children(dir));
            synced?;
            if let Some((children, stat, watcher)) = unless_missing(listed)? {
                let ids = (stat.czxid, stat.mzxid);
                return Ok(self.watched(children, dir, ids, watcher, &connection));
            }
            if let (None, watcher) = client.check_and_watch_stat(dir).await? {
                return Ok(self.watched(Vec::new(), dir, NOT_THERE, watcher, &connection));
            }
            // It was made in between.
        }
    }

    /// Looks for a node, with everything that was done before the call, and watches it, also if it is not there. What is found is
    /// told by the transaction that made it.
    pub(crate) async fn watch_node(&self, path: &str) -> Result<Watched> {
        let connection = self.connection().await?;
        let client = &connection.client;
        let (synced, checked) = tokio::join!(client.sync(path), client.check_and_watch_stat(path));
        synced?;
        let (stat, watcher) = checked?;
        let ids = stat.map_or(NOT_THERE, |stat| (stat.czxid, stat.mzxid));
        let found = stat.map(|stat| stat.czxid.to_string()).into_iter().collect();
        Ok(self.watched(found, path, ids, watcher, &connection))
    }

    fn watched(
        &self,
        found: Vec<String>,
        path: &str,
        ids: (i64, i64),
        watcher: OneshotWatcher,
        connection: &Connection,
    ) -> Watched {
        let watch = Watch::of(path.to_owned(), ids, watcher, connection.liveness());
        self.keep_armed(watch.state());
        Watched { found, watch }
    }

    /// Looks for a node that this session may have made, with everything that was done before the call. A node of another
    /// session ends with that session, and is nobody's to hold.
    pub(crate) async fn find(&self, node: &NodeRef) -> Result<Option<FoundNode>> {
        let (path, read) = match node {
            NodeRef::At(path) | NodeRef::Marked { path, .. } => (path.clone(), self.read_latest(path).await?),
            NodeRef::Prefix(prefix) => {
                let (dir, name) = (parent(prefix), basename(prefix));
                let children = self.list_latest(dir).await?;
                let Some(name) = children.iter().find(|child| child.starts_with(name)) else {
                    return Ok(None);
                };
                let path = format!("{dir}/{name}");
                let connection = self.connection().await?;
                let read = unless_missing(connection.client.get_data(&path).await)?;
                (path, read)
            }
        };
        let own = read.filter(|(data, stat)| self.is_own(node, data, stat));
        Ok(own.map(|(_, stat)| FoundNode {
            path,
            czxid: stat.czxid,
        }))
    }

    /// A node with these data and this state is this session's, and has the mark of `node`, if that has one.
    pub(crate) fn is_own(&self, node: &NodeRef, data: &[u8], stat: &Stat) -> bool {
        stat.ephemeral_owner == self.id() && data.starts_with(node.mark().as_bytes())
    }
}

/// Returns the prefix of a node's name that a directory's data are, if they are one.
fn prefix_in(data: Vec<u8>) -> Option<String> {
    // Others may write anything there.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    String::from_utf8(data)
        .ok()
        .filter(|prefix| prefix.bytes().all(is_plain))
}

fn unless_missing<T>(reply: std::result::Result<T, ZkError>) -> std::result::Result<Option<T>, ZkError> {
    match reply {
        Ok(value) => Ok(Some(value)),
        Err(ZkError::NoNode) => Ok(None),
        Err(error) => Err(error),
    }
}

fn deleted(reply: std::result::Result<(), ZkError>) -> Result<bool> {
    Ok(unless_missing(reply)?.is_some())
}

fn listed(reply: std::result::Result<Vec<String>, ZkError>) -> Result<Vec<String>> {
    Ok(unless_missing(reply)?.unwrap_or_default())
}
