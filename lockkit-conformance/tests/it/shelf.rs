//! A backend over a map that its clients share, with one defect at a time. Each request is sent, and its reply comes later.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::{Harness, Outage, Way};
use lockkit_core::{
    Error, FencingToken, Holder, LockClient, LockKind, LockName, LockState, LossReason, Result,
    spi::{
        Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Mode, OwnerId, Renewal,
        fence::{MOST, check},
    },
};
use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};

/// The defect, named after what the backend does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mutant {
    /// It has no defect.
    Sound,
    // Attempts.
    GrantsTwice,
    GrantsBeforeTheEnd,
    GrantsWhatIsAsked,
    TakenIsAnError,
    OutageIsTaken,
    LosesItsGrant,
    FindsWithNewTokens,
    FindsWithoutExtending,
    ClockAfterAttempt,
    ServerKeepsHalf,
    LeaseIsTwice,
    WaitsWithoutPatience,
    // Tokens.
    RepeatsTokens,
    ForgetsTokensOfTheFree,
    ForgetsTokensOfTheExpired,
    BlocksOverlap,
    OneTokenTooMany,
    NewNamesForgetTheRaise,
    UsedNamesForgetTheRaise,
    RaisesLower,
    // Renewals.
    RenewsForOthers,
    RenewsNothing,
    HeldWhateverIsThere,
    RevivesTheBroken,
    RevivesTheExpired,
    LostIsAnError,
    ClockAfterRenewal,
    RenewsTheAsked,
    AskedIsLost,
    KeepsItsTtl,
    ShortensOnlyHere,
    // Releases.
    ForgetsToRelease,
    ReleasesForOthers,
    ReleasesWhatWasSeen,
    OkThoughGone,
    OkWhileItsLeaseLasts,
    SecondReleaseIsLost,
    EndsWithItsRelease,
    // What is shown.
    HidesTheLabel,
    HidesTheHolder,
    ShowsTheExpired,
    ShowsTheLastToken,
    ShowsMoreThanIsLeft,
    ShowsLocksAsSemaphores,
    ProlongsWhatItShows,
    // Others' holds.
    ForceIgnoresTheToken,
    ForceDoesNothing,
    ForceDenies,
    AskingIgnoresTheToken,
    AskingDoesNothing,
    AdoptsAndLeavesTheOwner,
    AdoptsWhateverTheToken,
    AdoptsTheAsked,
    AdoptsWithoutExtending,
    // Several holds of a client.
    OneHoldAClient,
    TakenEndsTheRest,
    LosesReleasesAtOnce,
    // Names and claims.
    FoldsCase,
    CutsLongNames,
    TrimsNames,
    ClaimsToBeFifo,
    ClaimsWakeUps,
    ClaimsShared,
    HintsAllTheTime,
}

/// The server, and what is wrong with its clients.
#[derive(Clone, Debug)]
pub(crate) struct Shelf {
    mutant: Mutant,
    entries: Arc<Mutex<HashMap<String, Entry>>>,
    /// All tokens were raised above this one.
    raised: Arc<AtomicU64>,
    /// The client's way to it.
    outage: Arc<Mutex<Option<Outage>>>,
    session: Session,
}

/// A client's session, which is locked while a release of it is under way.
type Session = Arc<tokio::sync::Mutex<()>>;

#[derive(Debug, Default)]
struct Entry {
    last_token: u64,
    hold: Option<Hold>,
}

#[derive(Clone, Debug)]
struct Hold {
    owner: OwnerId,
    tokens: (u64, u64),
    until: Instant,
    label: Option<String>,
    asked: bool,
    session: Session,
}

impl Hold {
    fn has(&self, token: FencingToken) -> bool {
        self.tokens.0 <= token.get() && token.get() <= self.tokens.1
    }
}

#[derive(Debug)]
struct ShelfClaim {
    shelf: Shelf,
    request: ClaimRequest,
    /// A grant's reply has come, and no release since.
    seen: bool,
    /// The end of the lease that was granted.
    until: Option<Instant>,
    released: bool,
}

impl Shelf {
    pub(crate) fn with(mutant: Mutant) -> Self {
        Self {
            mutant,
            entries: Arc::default(),
            raised: Arc::default(),
            outage: Arc::default(),
            session: Arc::default(),
        }
    }

    /// Returns the same server, for another client.
    fn in_a_session(&self) -> Self {
        Self {
            session: Arc::default(),
            ..self.clone()
        }
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == mutant
    }

    /// Sends a request, and awaits its reply.
    async fn ask<T>(&self, name: &LockName, act: impl FnOnce(&mut Entry) -> T) -> T {
        yield_now().await;
        while self.outage.lock().unwrap().is_some() {
            sleep(Duration::from_millis(2)).await;
        }
        let reply = self.at_the_server(name, act);
        yield_now().await;
        reply
    }

    fn at_the_server<T>(&self, name: &LockName, act: impl FnOnce(&mut Entry) -> T) -> T {
        let mut key = name.as_str().to_owned();
        match self.mutant {
            Mutant::FoldsCase => key = key.to_lowercase(),
            Mutant::CutsLongNames => key = key.chars().take(255).collect(),
            Mutant::TrimsNames => key = String::from(key.trim()),
            _ => {}
        }
        let mut entries = self.entries.lock().unwrap();
        let entry = entries.entry(key).or_default();
        let now = Instant::now();
        let keeps = self.is(Mutant::ShowsTheExpired) || self.is(Mutant::RevivesTheExpired);
        if !keeps && entry.hold.take_if(|hold| hold.until <= now).is_some() {
            self.forget(entry, Mutant::ForgetsTokensOfTheExpired);
        }
        act(entry)
    }

    /// Ends what the client holds of other names.
    fn end_the_rest(&self, name: &LockName) {
        let mut entries = self.entries.lock().unwrap();
        for (_, entry) in entries.iter_mut().filter(|(other, _)| *other != name.as_str()) {
            entry
                .hold
                .take_if(|hold| Arc::ptr_eq(&hold.session, &self.session));
        }
    }

    fn forget(&self, entry: &mut Entry, mutant: Mutant) {
        if self.is(mutant) {
            entry.last_token = 0;
        }
    }
}

#[async_trait]
impl Backend for Shelf {
    fn info(&self) -> BackendInfo {
        let mut info = BackendInfo::new("shelf", "shelf:");
        info.fallback_poll = Duration::from_millis(5);
        info.capabilities.lease = true;
        info.capabilities.revoke = true;
        info.capabilities.revoke_by_force = true;
        info.capabilities.detach = true;
        info.capabilities.local_handoffs = true;
        info.capabilities.raise_fence = true;
        info.capabilities.fifo = self.is(Mutant::ClaimsToBeFifo);
        info.capabilities.shared = self.is(Mutant::ClaimsShared);
        if self.is(Mutant::ClaimsWakeUps) {
            info.capabilities.notified = true;
            info.fallback_poll = Duration::from_secs(1);
        }
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if request.mode != Mode::Exclusive && !self.is(Mutant::ClaimsShared) {
            return Err(Error::unsupported("shelf", "any mode but the exclusive one"));
        }
        Ok(Box::new(ShelfClaim {
            shelf: self.clone(),
            request: request.clone(),
            seen: false,
            until: None,
            released: false,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let is_shown = (kind == LockKind::Lock || self.is(Mutant::ShowsLocksAsSemaphores))
            && !self.is(Mutant::HidesTheHolder);
        let hold = self.ask(name, |entry| {
            if let (Mutant::ProlongsWhatItShows, Some(hold)) = (self.mutant, &mut entry.hold) {
                hold.until += Duration::from_secs(1);
            }
            let is_over = |hold: &Hold| hold.until <= Instant::now() && !self.is(Mutant::ShowsTheExpired);
            entry.hold.clone().filter(|hold| !is_over(hold))
        });
        let holder = hold.await.filter(|_| is_shown).map(|hold| {
            let mut left = hold.until.saturating_duration_since(Instant::now());
            if self.is(Mutant::ShowsMoreThanIsLeft) {
                left *= 2;
            }
            let token = match self.mutant {
                Mutant::ShowsTheLastToken => hold.tokens.1,
                _ => hold.tokens.0,
            };
            let label = hold.label.filter(|_| !self.is(Mutant::HidesTheLabel));
            Holder::new(FencingToken::new(token), label, Some(left))
        });
        Ok(LockState::new(holder.into_iter().collect(), None))
    }

    async fn revoke(&self, name: &LockName, _: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        let since = Instant::now();
        let until = self.ask(name, |entry| {
            let any = self.is(Mutant::AskingIgnoresTheToken);
            let hold = entry.hold.as_mut().filter(|hold| any || hold.has(token))?;
            hold.asked |= !self.is(Mutant::AskingDoesNothing);
            Some(hold.until)
        });
        let left = |until: Instant| until.saturating_duration_since(since);
        Ok(until.await.map(|until| Lease::new(since, Some(left(until)))))
    }

    async fn revoke_by_force(&self, name: &LockName, _: LockKind, token: FencingToken) -> Result<bool> {
        let ended = self.ask(name, |entry| {
            let any = self.is(Mutant::ForceIgnoresTheToken);
            let hits = entry.hold.as_ref().is_some_and(|hold| any || hold.has(token));
            if hits && !self.is(Mutant::ForceDoesNothing) {
                entry.hold = None;
            }
            hits
        });
        Ok(ended.await && !self.is(Mutant::ForceDenies))
    }

    async fn fence(&self) -> Result<FencingToken> {
        yield_now().await;
        let entries = self.entries.lock().unwrap();
        let granted = entries.values().map(|entry| entry.last_token).max();
        let raised = self.raised.load(Ordering::Relaxed);
        Ok(FencingToken::new(granted.unwrap_or(0).max(raised)))
    }

    async fn raise_fence(&self, above: FencingToken) -> Result<FencingToken> {
        check(above, MOST)?;
        yield_now().await;
        if self.is(Mutant::RaisesLower) {
            self.raised.store(above.get(), Ordering::Relaxed);
        } else {
            self.raised.fetch_max(above.get(), Ordering::Relaxed);
        }
        self.fence().await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

impl ShelfClaim {
    fn is(&self, mutant: Mutant) -> bool {
        self.shelf.is(mutant)
    }

    /// Returns the end of a lease that begins now, at the server.
    fn end(&self) -> Instant {
        let ttl = self.request.ttl;
        Instant::now()
            + if self.is(Mutant::ServerKeepsHalf) {
                ttl / 2
            } else {
                ttl
            }
    }

    fn lease(&self, sent: Instant, read_late: Mutant) -> Lease {
        let since = if self.is(read_late) { Instant::now() } else { sent };
        let factor = if self.is(Mutant::LeaseIsTwice) { 2 } else { 1 };
        Lease::new(since, Some(self.request.ttl * factor))
    }

    fn granted(&self, entry: &mut Entry) -> Option<(u64, u64)> {
        let owner = self.request.owner;
        let early = self.request.ttl / 5;
        if let Some(hold) = &mut entry.hold {
            if hold.owner == owner && !self.is(Mutant::FindsWithNewTokens) {
                if !self.is(Mutant::FindsWithoutExtending) {
                    hold.until = self.end();
                }
                return Some(hold.tokens).filter(|_| !self.is(Mutant::LosesItsGrant));
            }
            let is_over = match self.shelf.mutant {
                Mutant::GrantsTwice => true,
                Mutant::GrantsBeforeTheEnd => hold.until <= Instant::now() + early,
                Mutant::GrantsWhatIsAsked => hold.asked,
                // It clears nothing away by itself.
                _ => hold.until <= Instant::now(),
            };
            if !is_over && hold.owner != owner {
                return None;
            }
        }
        let block = u64::from(self.request.tokens.get());
        let forgets = match self.shelf.mutant {
            Mutant::NewNamesForgetTheRaise => entry.last_token == 0,
            Mutant::UsedNamesForgetTheRaise => entry.last_token > 0,
            _ => false,
        };
        if !forgets {
            let raised = self.shelf.raised.load(Ordering::Relaxed);
            entry.last_token = entry.last_token.max(raised);
        }
        let (first, last) = (entry.last_token + 1, entry.last_token + block);
        match self.shelf.mutant {
            Mutant::RepeatsTokens => {}
            Mutant::BlocksOverlap => entry.last_token = first,
            _ => entry.last_token = last,
        }
        let tokens = match self.shelf.mutant {
            Mutant::OneTokenTooMany => (first, last + 1),
            _ => (first, last),
        };
        entry.hold = Some(Hold {
            owner,
            tokens,
            until: self.end(),
            label: self.request.label.as_ref().map(ToString::to_string),
            asked: false,
            session: self.shelf.session.clone(),
        });
        Some(tokens)
    }

    fn renewed(&self, entry: &mut Entry) -> Option<Renewal> {
        let (owner, end) = (self.request.owner, self.end());
        let Some(hold) = &mut entry.hold else {
            if self.is(Mutant::RevivesTheBroken) {
                entry.last_token += 1;
                let tokens = (entry.last_token, entry.last_token);
                entry.hold = Some(Hold {
                    owner,
                    tokens,
                    until: end,
                    label: None,
                    asked: false,
                    session: self.shelf.session.clone(),
                });
                return None;
            }
            return Some(Renewal::Lost(LossReason::Revoked))
                .filter(|_| !self.is(Mutant::HeldWhateverIsThere));
        };
        if hold.owner != owner {
            if self.is(Mutant::RenewsForOthers) {
                hold.until = end;
                return None;
            }
            return Some(Renewal::Lost(LossReason::Revoked));
        }
        if hold.asked && !self.is(Mutant::RenewsTheAsked) {
            return Some(match self.shelf.mutant {
                Mutant::AskedIsLost => Renewal::Lost(LossReason::Revoked),
                _ => Renewal::Asked,
            });
        }
        let until = match self.shelf.mutant {
            Mutant::RenewsNothing => hold.until,
            Mutant::ShortensOnlyHere => hold.until.max(end),
            _ => end,
        };
        hold.until = until;
        None
    }
}

#[async_trait]
impl Claim for ShelfClaim {
    async fn attempt(&mut self, _: Duration) -> Result<Option<Grant>> {
        if self.released && self.is(Mutant::EndsWithItsRelease) {
            return Err(Error::permanent("shelf", "acquire", "released"));
        }
        let outage = *self.shelf.outage.lock().unwrap();
        match outage {
            Some(_) if self.is(Mutant::OutageIsTaken) => return Ok(None),
            Some(Outage::Refused) => return Err(Error::transient("shelf", "acquire", "refused")),
            // Nobody answers.
            _ => {}
        }
        let sent = Instant::now();
        let tokens = self
            .shelf
            .ask(&self.request.name, |entry| self.granted(entry))
            .await;
        let ends_the_rest = match tokens {
            Some(_) => Mutant::OneHoldAClient,
            None => Mutant::TakenEndsTheRest,
        };
        if self.is(ends_the_rest) {
            self.shelf.end_the_rest(&self.request.name);
        }
        let Some((first, last)) = tokens else {
            if self.is(Mutant::WaitsWithoutPatience) {
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
            if self.is(Mutant::TakenIsAnError) {
                return Err(Error::transient("shelf", "acquire", "no answer"));
            }
            return Ok(None);
        };
        (self.seen, self.until) = (true, Some(self.end()));
        let lease = self.lease(sent, Mutant::ClockAfterAttempt);
        Ok(Some(Grant::new(first..=last, lease)))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let sent = Instant::now();
        let other = self
            .shelf
            .ask(&self.request.name, |entry| self.renewed(entry))
            .await;
        match other {
            None => Ok(Renewal::Held(self.lease(sent, Mutant::ClockAfterRenewal))),
            Some(Renewal::Lost(_)) if self.is(Mutant::LostIsAnError) => {
                Err(Error::transient("shelf", "renew", "it is not there"))
            }
            Some(renewal) => Ok(renewal),
        }
    }

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        if !self.is(Mutant::KeepsItsTtl) {
            self.request.ttl = ttl;
        }
        Ok(Some(ttl))
    }

    fn detach(&mut self) -> Option<OwnerId> {
        Some(self.request.owner)
    }

    async fn adopt(&mut self, from: OwnerId, token: FencingToken) -> Result<Option<Renewal>> {
        let (sent, owner, end) = (Instant::now(), self.request.owner, self.end());
        let adopted = self.shelf.ask(&self.request.name, |entry| {
            let any = self.is(Mutant::AdoptsWhateverTheToken);
            let hold = entry.hold.as_mut()?;
            if !(hold.owner == from || hold.owner == owner) || !(any || hold.has(token)) {
                return None;
            }
            if hold.asked && !self.is(Mutant::AdoptsTheAsked) {
                return Some(Renewal::Asked);
            }
            if !self.is(Mutant::AdoptsAndLeavesTheOwner) {
                hold.owner = owner;
            }
            if !self.is(Mutant::AdoptsWithoutExtending) {
                hold.until = hold.until.max(end);
            }
            hold.tokens = (token.get(), token.get());
            Some(Renewal::Held(Lease::new(sent, Some(self.request.ttl))))
        });
        let adopted = adopted.await;
        Ok(Some(adopted.unwrap_or(Renewal::Lost(LossReason::Gone))))
    }

    async fn release(&mut self) -> Result<()> {
        let owner = self.request.owner;
        let seen = std::mem::take(&mut self.seen);
        let was_released = std::mem::replace(&mut self.released, true);
        if self.is(Mutant::ReleasesWhatWasSeen) && !seen {
            return Ok(());
        }
        let under_way = self.shelf.session.try_lock();
        if under_way.is_err() && self.is(Mutant::LosesReleasesAtOnce) {
            return Ok(());
        }
        let ended = self.shelf.ask(&self.request.name, |entry| {
            let any = self.is(Mutant::ReleasesForOthers);
            let ends = entry.hold.as_ref().is_some_and(|hold| any || hold.owner == owner);
            if ends && !self.is(Mutant::ForgetsToRelease) {
                entry.hold = None;
                self.shelf.forget(entry, Mutant::ForgetsTokensOfTheFree);
            }
            ends
        });
        let was_there = ended.await;
        drop(under_way);
        if self.is(Mutant::OkWhileItsLeaseLasts) && self.until > Some(Instant::now()) {
            return Ok(());
        }
        let again = was_released && self.is(Mutant::SecondReleaseIsLost);
        if (seen && !was_there && !self.is(Mutant::OkThoughGone)) || again {
            return Err(Error::lost("shelf", self.request.name.clone(), LossReason::Gone));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        if !self.is(Mutant::HintsAllTheTime) {
            std::future::pending::<()>().await;
        }
    }
}

#[async_trait]
impl Harness for Shelf {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.in_a_session()))
    }

    async fn on_a_way(&self) -> Result<Option<(LockClient, Way)>> {
        let mut behind = self.in_a_session();
        behind.outage = Arc::default();
        let outage = behind.outage.clone();
        let way = Way::new(move |cut| *outage.lock().unwrap() = cut);
        Ok(Some((LockClient::new(behind), way)))
    }
}
