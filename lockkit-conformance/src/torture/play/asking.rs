//! Holds that change their length, and holders that are asked for what they hold.

use std::{sync::atomic::Ordering, time::Duration};

use lockkit_core::{
    AcquireOptions, Error, FencingToken, HoldView, LockClient, LockGuard, Result, Revocation, spi::chain,
};
use tokio::time::{Instant, sleep};

use super::{OP_TIMEOUT, SLACK, Scene};
use crate::{
    history::now,
    torture::{
        HoldAs, Millis,
        record::{AskBack, Law, Loss, Note, Record, Said},
    },
};

impl Scene<'_> {
    /// Says whether nothing befalls the deployment, and the machine runs: then every operation succeeds.
    pub(super) fn is_calm(&self) -> bool {
        !self.seat.is_gone()
            && self.seat.generation.load(Ordering::SeqCst) == self.generation
            && self.stage.part.schedule.is_harmless()
            && self.stage.watch.stood_still() < Duration::from_millis(100)
    }

    /// Changes the ttl of a live hold to `other`, or back.
    pub(super) async fn retime(&self, guard: &LockGuard, record: &mut Record, other: Millis) {
        let before = (record.ttl, record.ttl_now);
        let ttl = if record.ttl_now == other {
            self.step.ttl
        } else {
            other
        };
        // From the first request on the server may go by either, also if this process ends before the reply.
        record.ttl = record.ttl.max(ttl);
        record.ttl_now = record.ttl_now.max(ttl);
        self.note(record);
        let what = format!(
            "a ttl of {ttl} ms for {} on {}",
            self.who, record.acquisition.lock
        );
        let length = Duration::from_millis(ttl);
        let client = self.seat.client();
        let has_leases = client.capabilities().lease;
        let done = self
            .stage
            .bounded(OP_TIMEOUT + SLACK, &what, guard.set_ttl(length))
            .await;
        match done {
            Some(Ok(())) if !has_leases => {
                self.stage
                    .find(Law::Denial, format!("{what}: changed, where a hold has no lease"));
            }
            Some(Ok(())) => {
                record.ttl_now = ttl;
                self.judge_length(guard, &client, length, &what);
            }
            Some(Err(Error::Unsupported { .. })) if !has_leases => {
                (record.ttl, record.ttl_now) = before;
            }
            Some(Err(error @ (Error::Unsupported { .. } | Error::InvalidOptions { .. }))) => {
                self.stage
                    .find(Law::Denial, format!("{what}: refused: {}", chain(&error)));
            }
            Some(Err(error)) if error.is_lost() || self.seat.is_gone() => {}
            Some(Err(error)) if !error.is_transient() && is_past_max_hold(record) => {}
            Some(Err(error)) => record.error = chain(&error),
            None => {}
        }
        self.note(record);
    }

    pub(super) fn judge_length(&self, guard: &LockGuard, client: &LockClient, ttl: Duration, what: &str) {
        let Some(length) = guard.lease_length().filter(|_| guard.is_held()) else {
            return;
        };
        // Where a server's session decides, it does not follow the ttl.
        let long = Duration::from_secs(3_600);
        let follows = client.dead_holder_bound(long) >= long;
        let is_short = follows && length < ttl / 2 && self.is_calm();
        if length > ttl || is_short {
            let detail = format!("{what}: done, and the lease has a length of {length:?}");
            self.stage.find(Law::Length, detail);
        }
    }

    /// Keeps the guard of a hold that is lost for a while, as a task does that brings its work to an end, or hangs.
    pub(super) async fn stay(&self, view: &HoldView, record: &mut Record) {
        let until = (Instant::now() + Duration::from_millis(self.step.stays)).min(self.stage.ends);
        loop {
            let before = now();
            let is_kept = record.loss == Loss::Asked
                && self.seat.generation.load(Ordering::SeqCst) == self.generation
                && view.valid_until().is_none_or(|end| Instant::now() < end);
            if is_kept {
                record.kept = Some(before);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            sleep(left.min(Duration::from_millis(5))).await;
        }
    }

    /// Asks the holder for its hold, and waits for its end.
    pub(super) async fn ask_back(&self, client: &LockClient, name: &str, within: Duration) {
        let can = client.capabilities().revoke;
        let Some(Ok(state)) = self.look_at(client, name).await else {
            return;
        };
        let tokens = state.holders.iter().map(|holder| holder.token);
        // A backend that cannot ask says so whoever holds.
        let mut tokens: Vec<_> = tokens.collect();
        if !can && tokens.is_empty() {
            tokens.push(FencingToken::new(1));
        }
        // Of several that hold together, one.
        let Some(token) = tokens.get(usize::try_from(self.who).unwrap_or_default() % tokens.len().max(1))
        else {
            return;
        };
        let mut asked = AskBack {
            lock: name.to_owned(),
            token: token.get(),
            from: now(),
            to: u64::MAX,
            said: Said::Nothing,
        };
        self.stage.note(Note::AskBack(asked.clone()));
        let what = format!("asking for {token} of {name} within {within:?}");
        let limit = within + AcquireOptions::DEFAULT_OP_TIMEOUT + SLACK;
        let answer = self
            .stage
            .bounded(limit, &what, self.revoked(client, name, *token, within));
        asked.said = match answer.await {
            None => Said::Nothing,
            Some(Ok(_)) if !can => {
                self.stage.find(
                    Law::Denial,
                    format!("{what}: answered, where nobody can be asked"),
                );
                Said::Nothing
            }
            Some(Err(Error::Unsupported { .. })) if !can => return,
            Some(Ok(Revocation::NotHeld)) => Said::NotHeld,
            Some(Ok(Revocation::StillHeld { .. })) => Said::Still,
            Some(Ok(_)) => Said::Ended,
            Some(Err(error)) => {
                if matches!(error, Error::Unsupported { .. }) {
                    self.stage
                        .find(Law::Denial, format!("{what}: refused: {}", chain(&error)));
                } else if self.is_calm() {
                    self.stage
                        .find(Law::Failure, format!("{what}: {}", chain(&error)));
                }
                Said::Nothing
            }
        };
        asked.to = now();
        self.stage.note(Note::AskBack(asked));
    }

    async fn revoked(
        &self,
        client: &LockClient,
        name: &str,
        token: FencingToken,
        within: Duration,
    ) -> Result<Revocation> {
        match self.step.hold_as {
            HoldAs::Permit => client.revoke_permit(name, token, within).await,
            _ => client.revoke(name, token, within).await,
        }
    }
}

fn is_past_max_hold(record: &Record) -> bool {
    let granted = record.acquisition.granted.map(|(at, _)| at);
    let max_hold = record.max_hold.map(|millis| millis * 1_000_000);
    // The hold began before its holder heard of it.
    let asked = record.acquisition.asked;
    granted.is_some() && max_hold.is_some_and(|max_hold| now() >= asked + max_hold)
}
