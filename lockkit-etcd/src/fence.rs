//! Tokens: revisions, and what was added to them since tokens were raised.
//!
//! Whoever makes a key reads the key of the bases in the same transaction, or later. The bases say from which revision on each counts. So
//! a revision has one token for good, and it does not matter who reads it when.

use lockkit_core::spi::fence::Bases;

use crate::{
    backend::Shared,
    error::{Failure, Result},
    wire::{Compare, KeyValue, PutRequest, RangeRequest, Request, TxnRequest},
};

/// The number of times that the bases are read to raise them. Others who do so at the same time cost one each.
const MAX_LOOKS: usize = 64;

/// Returns the request for the key of the bases.
pub(crate) fn look(shared: &Shared) -> RangeRequest {
    RangeRequest {
        key: shared.layout().fence().into(),
        ..RangeRequest::default()
    }
}

/// Returns the bases in the answer to that request.
pub(crate) fn bases(found: &[KeyValue]) -> Result<Bases> {
    let Some(kv) = found.first() else {
        return Ok(Bases::default());
    };
    let written = u64::try_from(kv.mod_revision).ok();
    written.and_then(|written| Bases::read(&kv.value, written)).ok_or_else(|| {
        let key = String::from_utf8_lossy(&kv.key);
        let reason = format!(
            "{key} is not what lockkit has written there to raise tokens; delete it, and raise them again above all that were granted"
        );
        Failure::refused(reason, true)
    })
}

/// Returns the token of the entry that this revision has made.
pub(crate) fn token(bases: &Bases, revision: i64) -> Result<u64> {
    let token = u64::try_from(revision)
        .ok()
        .and_then(|revision| bases.token(revision));
    token.ok_or_else(|| no_token(revision))
}

fn no_token(revision: i64) -> Failure {
    Failure::refused(format!("no tokens are left at revision {revision}"), true)
}

impl Shared {
    pub(crate) async fn bases(&self) -> Result<Bases> {
        self.check_open()?;
        bases(&self.members.call(look(self)).await?.kvs)
    }

    /// Has all later tokens be above this one, unless they are without that. With zero it only looks. Returns the highest that there may
    /// be by then.
    pub(crate) async fn raise_fence(&self, above: u64) -> Result<u64> {
        self.check_open()?;
        self.members.logged_in().await?;
        for _ in 0..MAX_LOOKS {
            let answer = self.members.call(look(self)).await?;
            let bases = bases(&answer.kvs)?;
            let Some(revision) = answer.header.map(|header| header.revision) else {
                return Err(Failure::Unknown(
                    "the servers' answer names no revision".to_owned(),
                ));
            };
            let number = u64::try_from(revision).map_err(|_| no_token(revision))?;
            let Some(text) = bases.raised(above, number) else {
                return bases.fence(number).ok_or_else(|| no_token(revision));
            };
            let key = self.layout().fence();
            let unchanged = match answer.kvs.first() {
                Some(kv) => Compare::modified(key.as_str(), kv.mod_revision),
                None => Compare::created(key.as_str(), 0),
            };
            let put = PutRequest {
                key: key.into(),
                value: text,
                ..PutRequest::default()
            };
            let request = TxnRequest {
                compare: vec![unchanged],
                success: vec![Request::Put(put).into()],
                failure: Vec::new(),
            };
            if self.members.call(request).await?.succeeded {
                return Ok(above);
            }
        }
        Err(Failure::Unknown(
            "others keep raising the tokens; try again".to_owned(),
        ))
    }
}
