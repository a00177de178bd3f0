//! Lists of what is held.

use std::collections::BTreeSet;

use lockkit_core::{AcquireOptions, Error, ListedLock, LockClient, LockKind, Result, spi::chain};

use super::{ELECTION, HoldAs, SLACK, Scene, locks_of};
use crate::{
    history::now,
    torture::record::{Law, Listed, Note},
};

impl Scene<'_> {
    /// Lists the locks and semaphores of this torture, or its elections.
    pub(super) async fn list(&self, client: &LockClient) {
        let can = client.capabilities().list;
        let of_elections = self.step.hold_as == HoldAs::Leader;
        let beginning = if of_elections { ELECTION } else { "" };
        let prefix = format!("{beginning}{}/", self.stage.part.prefix);
        let what = format!("listing {prefix:?}");
        let from = now();
        // It ends by itself after an error, which a page has by then.
        let limit = AcquireOptions::DEFAULT_OP_TIMEOUT * 2 + SLACK;
        let found = match self.stage.bounded(limit, &what, all_of(client, &prefix)).await {
            None => return,
            Some(Err(Error::Unsupported { .. })) if !can => return,
            Some(Ok(found)) if can => found,
            Some(Ok(_)) => {
                let detail = format!("{what}: answered, where nothing can be listed");
                return self.stage.find(Law::Denial, detail);
            }
            Some(Err(error @ Error::Unsupported { .. })) => {
                let detail = format!("{what}: refused: {}", chain(&error));
                return self.stage.find(Law::Denial, detail);
            }
            Some(Err(error)) => {
                if self.is_calm() {
                    self.stage
                        .find(Law::Failure, format!("{what}: {}", chain(&error)));
                }
                return;
            }
        };
        let to = now();
        let names = self.judge_names(&found, &what);
        self.stage.note(Note::Listed(Listed {
            from,
            to,
            of_elections,
            names,
        }));
    }

    /// Each is there once, is held, and is a name that somebody uses.
    fn judge_names(&self, found: &[ListedLock], what: &str) -> Vec<String> {
        let steps = self.stage.part.schedule.tasks.iter().flat_map(|task| &task.steps);
        let known: BTreeSet<_> = steps
            .flat_map(|step| locks_of(step).map(|number| self.stage.part.name(step.hold_as, number)))
            .collect();
        let is_semaphore = |name: &str| name.rsplit('/').next().is_some_and(|last| last.starts_with('s'));
        let mut names = BTreeSet::new();
        for ListedLock {
            name, kind, state, ..
        } in found
        {
            let name = name.as_str();
            let wrong = if !known.contains(name) {
                "a name that nobody uses"
            } else if is_semaphore(name) != (*kind == LockKind::Semaphore) {
                "another kind of thing"
            } else if state.is_free() {
                "what nobody holds"
            } else if !names.insert(name.to_owned()) {
                "one name twice"
            } else {
                continue;
            };
            self.stage.find(
                Law::List,
                format!("{what}: shows {wrong}: {name:?}, {kind:?}, {state:?}"),
            );
        }
        names.into_iter().collect()
    }
}

async fn all_of(client: &LockClient, prefix: &str) -> Result<Vec<ListedLock>> {
    let mut list = client.list(prefix)?;
    let mut found = Vec::new();
    while let Some(lock) = list.next().await {
        found.push(lock?);
    }
    Ok(found)
}
