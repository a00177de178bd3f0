//! A backend as a third party would write it: one file, no queue, no shared mode, no wake-ups.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_conformance::{
    Harness,
    history::{Nanos, now},
};
use lockkit_core::{
    Error, FencingToken, Holder, ListedLock, LockClient, LockKind, LockName, LockState, LossReason, Result,
    spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Lease, Lister, Mode, OwnerId, Renewal},
};
use tempfile::TempDir;
use tokio::time::Instant;

mod passes {
    lockkit_conformance::tests!(super::Plain::default());
}

/// The defect that it has, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    #[default]
    None,
    GrantsTwice,
    RepeatsTokens,
    ForgetsToRelease,
    ErrorIsAGrant,
    TakenIsAnError,
    FoldsCase,
    ReleasesForOthers,
    RevivesLostHolds,
    /// A renewal extends the hold that it finds, whoever has it.
    RenewsForOthers,
    HidesTheLabel,
    ClaimsToBeFifo,
    ClaimsNoLease,
    ClaimsWakeUps,
    NeverRenews,
    KeepsItsTtl,
    OutlivesItsHolder,
    LeaksItsSecret,
    TracesItsSecret,
    GrantsNobody,
    KeepsItsHolds,
    /// A hold that is asked for ends at once.
    LetsOthersIn,
    /// It says that it asks, and asks nobody.
    TellsNobody,
    AnswersWhatItDenies,
    /// An inspection shows no holder.
    HidesItsHolds,
    /// It lists a name that nobody uses beside those that somebody holds.
    ListsStrangers,
    ListsNothing,
    ListsForEver,
    /// A hold that is detached ends at once, and is adopted all the same.
    DetachesWhatEnds,
    /// A hold that is detached is over for those who adopt it.
    RefusesAdoption,
    /// Adopting is unsupported where it is claimed.
    ClaimsAdoption,
    /// To make a hold a shared one is unsupported where it is claimed.
    ClaimsDowngrade,
}

impl Fault {
    const FOR_HELPERS: [Self; 3] = [
        Self::RepeatsTokens,
        Self::OutlivesItsHolder,
        Self::ForgetsToRelease,
    ];
}

const SECRET: &str = "correct horse battery staple";

/// All locks in one file, read and replaced under the file system's own lock: slow, and the same for all processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plain {
    fault: Fault,
    /// Made when it is first needed, since a helper is given the path of another's.
    directory: Arc<OnceLock<TempDir>>,
    at: Option<PathBuf>,
    /// The owners that were asked for their holds.
    asked: Arc<Mutex<HashSet<OwnerId>>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Entry {
    name: String,
    last_token: u64,
    holder: Option<Hold>,
}

#[derive(Clone, Debug, PartialEq)]
struct Hold {
    owner: OwnerId,
    token: u64,
    /// On the clock that all processes share.
    until: Nanos,
    label: Option<String>,
}

impl Entry {
    fn current(&mut self) -> Option<OwnerId> {
        self.holder.take_if(|hold| hold.until <= now());
        self.holder.as_ref().map(|hold| hold.owner)
    }

    fn to_line(&self) -> String {
        let mut words = vec![hex(&self.name), self.last_token.to_string()];
        if let Some(hold) = &self.holder {
            words.extend([
                hold.owner.get().to_string(),
                hold.token.to_string(),
                hold.until.to_string(),
            ]);
            words.extend(hold.label.as_deref().map(hex));
        }
        words.join(" ")
    }

    fn from_line(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (name, last_token) = (unhex(words.next()?)?, words.next()?.parse().ok()?);
        let holder = words.next().and_then(|owner| {
            let owner = OwnerId::new(owner.parse().ok()?);
            let (token, until) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some(Hold {
                owner,
                token,
                until,
                label: words.next().and_then(unhex),
            })
        });
        Some(Self {
            name,
            last_token,
            holder,
        })
    }
}

fn hex(text: &str) -> String {
    let digits = text.bytes().flat_map(|byte| [byte >> 4, byte & 15]);
    digits
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

fn unhex(hex: &str) -> Option<String> {
    let bytes = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok());
    String::from_utf8(bytes.collect::<Option<_>>()?).ok()
}

/// `span` from now.
fn from_now(span: Duration) -> Nanos {
    now() + u64::try_from(span.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[derive(Debug)]
struct PlainClaim {
    backend: Plain,
    request: ClaimRequest,
    /// The hold that a grant told of, and no release has ended since.
    holds: bool,
}

impl Plain {
    pub(crate) fn with(fault: Fault) -> Self {
        Self {
            fault,
            ..Self::default()
        }
    }

    fn directory(&self) -> PathBuf {
        let made = || {
            self.directory
                .get_or_init(|| TempDir::new().unwrap())
                .path()
                .to_owned()
        };
        self.at.clone().unwrap_or_else(made)
    }

    fn entry<T>(&self, name: &LockName, act: impl FnOnce(&mut Entry) -> T) -> Result<T> {
        let key = match self.fault {
            Fault::FoldsCase => name.as_str().to_lowercase(),
            _ => name.as_str().to_owned(),
        };
        self.replaced(&key, act)
            .map_err(|error| Error::permanent("plain", "access", error))
    }

    fn replaced<T>(&self, key: &str, act: impl FnOnce(&mut Entry) -> T) -> io::Result<T> {
        let directory = self.directory();
        let alone = File::create(directory.join("lock"))?;
        alone.lock()?;
        let data = directory.join("data");
        let text = if data.exists() {
            fs::read_to_string(&data)?
        } else {
            String::new()
        };
        let mut entries: Vec<_> = text.lines().filter_map(Entry::from_line).collect();
        let index = entries
            .iter()
            .position(|entry| entry.name == key)
            .unwrap_or_else(|| {
                entries.push(Entry {
                    name: key.to_owned(),
                    ..Entry::default()
                });
                entries.len() - 1
            });
        let before = entries[index].clone();
        let answer = act(&mut entries[index]);
        if entries[index] != before {
            // A process may be killed at any moment: the old file or the new one, never a part.
            let lines: Vec<_> = entries.iter().map(Entry::to_line).collect();
            fs::write(directory.join("next"), lines.join("\n"))?;
            fs::rename(directory.join("next"), data)?;
        }
        alone.unlock()?;
        Ok(answer)
    }
}

#[async_trait]
impl Backend for Plain {
    fn info(&self) -> BackendInfo {
        let server = if self.fault == Fault::LeaksItsSecret {
            SECRET
        } else {
            "plain:"
        };
        let mut info = BackendInfo::new("plain", server);
        info.fallback_poll = Duration::from_millis(5);
        info.capabilities.lease = self.fault != Fault::ClaimsNoLease;
        info.capabilities.revoke_by_force = true;
        info.capabilities.list = matches!(
            self.fault,
            Fault::ListsStrangers | Fault::ListsNothing | Fault::ListsForEver
        );
        info.capabilities.detach = matches!(
            self.fault,
            Fault::DetachesWhatEnds | Fault::RefusesAdoption | Fault::ClaimsAdoption
        );
        info.capabilities.downgrade = self.fault == Fault::ClaimsDowngrade;
        info.capabilities.shared = self.fault == Fault::ClaimsDowngrade;
        info.capabilities.revoke = matches!(self.fault, Fault::LetsOthersIn | Fault::TellsNobody);
        info.capabilities.local_handoffs = true;
        info.capabilities.fifo = self.fault == Fault::ClaimsToBeFifo;
        if self.fault == Fault::ClaimsWakeUps {
            info.capabilities.notified = true;
            info.fallback_poll = Duration::from_secs(1);
        }
        info
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
        if request.mode != Mode::Exclusive {
            return Err(Error::unsupported("plain", "any mode but the exclusive one"));
        }
        if self.fault == Fault::TracesItsSecret {
            tracing::debug!(password = SECRET, "connecting");
        }
        let (backend, request) = (self.clone(), request.clone());
        let holds = false;
        Ok(Box::new(PlainClaim {
            backend,
            request,
            holds,
        }))
    }

    async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
        let shows_label = self.fault != Fault::HidesTheLabel;
        let holder = self.entry(name, |entry| entry.current().and(entry.holder.clone()))?;
        let shows_it = kind == LockKind::Lock && self.fault != Fault::HidesItsHolds;
        let holders = holder.filter(|_| shows_it).map(|hold| {
            let left = Duration::from_nanos(hold.until.saturating_sub(now()));
            Holder::new(
                FencingToken::new(hold.token),
                hold.label.filter(|_| shows_label),
                Some(left),
            )
        });
        Ok(LockState::new(holders.into_iter().collect(), None))
    }

    async fn revoke_by_force(&self, name: &LockName, _: LockKind, token: FencingToken) -> Result<bool> {
        self.entry(name, |entry| {
            entry.holder.take_if(|hold| hold.token == token.get()).is_some()
        })
    }

    fn list(&self, prefix: &str) -> Result<Box<dyn Lister>> {
        let page = match self.fault {
            Fault::ListsStrangers => {
                let mut locks = Vec::new();
                for name in ["l0", "l999"] {
                    let name = LockName::new([prefix, name].concat())?;
                    let state = LockState::new(vec![Holder::new(FencingToken::new(1), None, None)], None);
                    locks.push(ListedLock::new(name, LockKind::Lock, state));
                }
                Some(locks)
            }
            Fault::ListsNothing => None,
            Fault::ListsForEver => Some(Vec::new()),
            _ => return Err(Error::unsupported("plain", "listing")),
        };
        let ends = self.fault != Fault::ListsForEver;
        Ok(Box::new(PlainLister { page, ends }))
    }

    async fn revoke(&self, name: &LockName, _: LockKind, token: FencingToken) -> Result<Option<Lease>> {
        if !matches!(
            self.fault,
            Fault::LetsOthersIn | Fault::TellsNobody | Fault::AnswersWhatItDenies
        ) {
            return Err(Error::unsupported("plain", "asking"));
        }
        let hold = self.entry(name, |entry| {
            let asked = entry.holder.clone().filter(|hold| hold.token == token.get());
            if asked.is_some() && self.fault == Fault::LetsOthersIn {
                entry.holder = None;
            }
            asked
        })?;
        let Some(hold) = hold else { return Ok(None) };
        if self.fault == Fault::LetsOthersIn {
            self.asked.lock().unwrap().insert(hold.owner);
        }
        let left = Duration::from_nanos(hold.until.saturating_sub(now()));
        Ok(Some(Lease::new(Instant::now(), Some(left))))
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

struct PlainLister {
    page: Option<Vec<ListedLock>>,
    ends: bool,
}

#[async_trait]
impl Lister for PlainLister {
    async fn page(&mut self) -> Result<Option<Vec<ListedLock>>> {
        if self.ends {
            return Ok(self.page.take());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(Some(Vec::new()))
    }
}

#[async_trait]
impl Claim for PlainClaim {
    async fn attempt(&mut self, _: Duration) -> Result<Option<Grant>> {
        let (request, fault) = (&self.request, self.backend.fault);
        let (since, until) = (Instant::now(), from_now(request.ttl));
        let block = u64::from(request.tokens.get());
        let granted = self.backend.entry(&request.name, |entry| {
            let by_other = entry.current().is_some_and(|holder| holder != request.owner);
            if (by_other && fault != Fault::GrantsTwice) || fault == Fault::GrantsNobody {
                return None;
            }
            let token = entry.last_token + 1;
            if fault != Fault::RepeatsTokens {
                entry.last_token += block;
            }
            let (owner, label) = (request.owner, request.label.as_ref().map(ToString::to_string));
            let until = match fault {
                Fault::OutlivesItsHolder | Fault::KeepsItsHolds => Nanos::MAX,
                _ => until,
            };
            entry.holder = Some(Hold {
                owner,
                token,
                until,
                label,
            });
            Some(token..=token + block - 1)
        })?;
        let unanswered = || Error::transient("plain", "acquire", "no answer");
        let tokens = match (granted, fault) {
            (Some(tokens), _) => tokens,
            (None, Fault::ErrorIsAGrant) if fastrand::u8(..8) == 0 => u64::MAX - 1..=u64::MAX - 1,
            (None, Fault::TakenIsAnError) => return Err(unanswered()),
            (None, _) => return Ok(None),
        };
        let length = (fault != Fault::ClaimsNoLease).then_some(request.ttl);
        self.holds = true;
        Ok(Some(Grant::new(tokens, Lease::new(since, length))))
    }

    async fn renew(&mut self) -> Result<Renewal> {
        let (request, fault) = (&self.request, self.backend.fault);
        let (since, until) = (Instant::now(), from_now(request.ttl));
        if self.backend.asked.lock().unwrap().contains(&request.owner) {
            return Ok(Renewal::Asked);
        }
        let extends = !matches!(
            fault,
            Fault::NeverRenews | Fault::ClaimsNoLease | Fault::OutlivesItsHolder
        );
        let renewed = self.backend.entry(&request.name, |entry| {
            let holder = entry.current();
            let is_mine = match fault {
                Fault::RenewsForOthers => holder.is_some(),
                _ => holder == Some(request.owner),
            };
            if let (true, Some(hold)) = (is_mine && extends, &mut entry.holder) {
                hold.until = until;
            }
            is_mine || fault == Fault::RevivesLostHolds
        })?;
        let length = (fault != Fault::ClaimsNoLease).then_some(request.ttl);
        Ok(if renewed {
            Renewal::Held(Lease::new(since, length))
        } else {
            Renewal::Lost(LossReason::Revoked)
        })
    }

    fn set_ttl(&mut self, ttl: Duration) -> Result<Option<Duration>> {
        if self.backend.fault != Fault::KeepsItsTtl {
            self.request.ttl = ttl;
        }
        Ok(Some(ttl))
    }

    fn detach(&mut self) -> Option<OwnerId> {
        let (owner, fault) = (self.request.owner, self.backend.fault);
        if fault == Fault::DetachesWhatEnds {
            let ended = self
                .backend
                .entry(&self.request.name, |entry| entry.holder = None);
            ended.ok()?;
        }
        self.backend.info().capabilities.detach.then_some(owner)
    }

    async fn adopt(&mut self, _: OwnerId, _: FencingToken) -> Result<Option<Renewal>> {
        Ok(match self.backend.fault {
            Fault::DetachesWhatEnds => {
                Some(Renewal::Held(Lease::new(Instant::now(), Some(self.request.ttl))))
            }
            Fault::RefusesAdoption => Some(Renewal::Lost(LossReason::Gone)),
            _ => None,
        })
    }

    async fn release(&mut self) -> Result<()> {
        let (owner, fault) = (self.request.owner, self.backend.fault);
        let was_there = self.backend.entry(&self.request.name, |entry| {
            let is_mine = entry.current() == Some(owner) || fault == Fault::ReleasesForOthers;
            if is_mine && !matches!(fault, Fault::ForgetsToRelease | Fault::KeepsItsHolds) {
                entry.holder = None;
            }
            is_mine
        })?;
        if std::mem::take(&mut self.holds) && !was_there {
            return Err(Error::lost("plain", self.request.name.clone(), LossReason::Gone));
        }
        Ok(())
    }

    async fn notified(&mut self) {
        std::future::pending::<()>().await;
    }
}

#[async_trait]
impl Harness for Plain {
    async fn client(&self) -> Result<LockClient> {
        Ok(LockClient::new(self.clone()))
    }

    fn url(&self) -> Option<String> {
        self.directory()
            .to_str()
            .map(|path| format!("{:?} {path}", self.fault))
    }

    async fn connect(&self, url: &str) -> Result<LockClient> {
        let (fault, path) = url.split_once(' ').unwrap();
        let fault = Fault::FOR_HELPERS
            .into_iter()
            .find(|known| format!("{known:?}") == fault);
        let (fault, at) = (fault.unwrap_or_default(), Some(path.into()));
        Ok(LockClient::new(Self {
            fault,
            at,
            ..Self::default()
        }))
    }

    fn secret(&self) -> Option<String> {
        Some(SECRET.to_owned())
    }
}
