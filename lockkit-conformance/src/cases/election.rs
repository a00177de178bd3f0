//! Leaders and observers.

use std::{
    collections::BTreeMap,
    io::Write as _,
    ops::ControlFlow,
    process::ChildStdin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockkit_core::{Candidate, Election, Error, Leader, Leadership, LockClient, Observer, Revocation};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{
    case_run::{
        CaseRun, MOST_DEATHS, Outcome, PATIENCE, PROMPT, Stop, ensure, eventually, failed, granted_at_once,
        within,
    },
    history::{Nanos, now},
    process::Process,
};

/// The longest time until an observer sees a change that its backend can show: it looks once a second if nobody wakes it.
const SEEN: Duration = Duration::from_millis(1_500);

/// The environment variable that says how many leaders are killed.
const ROUNDS: &str = "LOCKKIT_ELECTION_ROUNDS";

/// Returns how many leaders are killed.
pub(crate) fn rounds() -> u32 {
    let asked = std::env::var(ROUNDS).ok();
    asked
        .and_then(|asked| asked.trim().parse().ok())
        .unwrap_or(MOST_DEATHS)
}

/// The election of this run, whose leaders outlast the case.
fn election(case: &CaseRun, client: &LockClient) -> Result<Election, Error> {
    Ok(client.election(case.name("a"))?.with_ttl(crate::case_run::LIMIT))
}

async fn leads_within(limit: Duration, what: &str, candidate: &Candidate) -> Result<Leadership, Stop> {
    Ok(within(limit, what, candidate.campaign()).await??)
}

pub(crate) async fn one_leads_at_a_time(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let [one, two] = [
        election(case, &clients[0])?.candidate("one")?,
        election(case, &clients[1])?.candidate("two")?,
    ];
    let same_client = election(case, &clients[0])?.candidate("another")?;
    let mut last = None;
    for is_dropped in [false, true] {
        let leadership = leads_within(PATIENCE, "nobody leads", &one).await?;
        ensure!(
            leadership.is_held() && leadership.id() == "one",
            "a fresh leadership is {leadership:?}"
        );
        for other in [&two, &same_client, &one] {
            let second = other.try_campaign().await?;
            ensure!(
                second.is_none(),
                "two lead at once: {leadership:?} and {second:?}"
            );
        }
        let waiting = two.clone();
        let waiter = tokio::spawn(async move { waiting.campaign().await });
        tokio::time::sleep(PROMPT / 10).await;
        ensure!(!waiter.is_finished(), "a second candidate leads beside the first");
        let token = leadership.token();
        ensure!(Some(token) > last, "{token:?} came after {last:?}");
        let (loss, view) = (leadership.lost(), leadership.view());
        if is_dropped {
            drop(leadership);
        } else {
            leadership.resign().await?;
        }
        ensure!(!view.is_held(), "a leader that has resigned leads");
        let next = within(PATIENCE, "the leader resigned", waiter)
            .await?
            .map_err(failed)??;
        ensure!(next.token() > token, "{:?} came after {token:?}", next.token());
        ensure!(loss.reason().is_none(), "a resignation was told as a loss");
        last = Some(next.token());
        next.resign().await?;
    }
    Ok(())
}

/// The leaders that an observer has seen, in order; `None` for nobody.
#[derive(Clone, Debug, Default)]
struct Seen(Arc<Mutex<Vec<Option<Leader>>>>);

impl Seen {
    fn by(mut observer: Observer) -> Self {
        let seen = Self::default();
        let kept = seen.clone();
        tokio::spawn(async move {
            while let Ok(change) = observer.next().await {
                kept.0.lock().unwrap_or_else(PoisonError::into_inner).push(change);
            }
        });
        seen
    }

    fn all(&self) -> Vec<Option<Leader>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it has seen `many` states.
    async fn come(&self, many: usize) -> Outcome {
        let what = format!("an observer sees change {many} of {self:?}");
        eventually(SEEN + PROMPT, &what, async || Ok(self.all().len() >= many)).await
    }
}

pub(crate) async fn observers_see_each_change_once(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?, case.client().await?];
    let elections = [
        election(case, &clients[0])?,
        election(case, &clients[1])?,
        election(case, &clients[2])?,
    ];
    let observers = [Seen::by(elections[0].observe()), Seen::by(elections[2].observe())];
    let mut expected = vec![None];
    let (mut times, mut last) = (Vec::new(), None);
    for (round, election) in elections.iter().cycle().take(4).enumerate() {
        for observer in &observers {
            observer.come(expected.len()).await?;
        }
        let id = format!("candidate {round}");
        let asked = Instant::now();
        let candidate = election.candidate(&*id)?;
        let leadership = leads_within(PATIENCE, "nobody leads", &candidate).await?;
        times.push((asked, Instant::now()));
        ensure!(
            Some(leadership.token()) > last,
            "{:?} came after {last:?}",
            leadership.token()
        );
        last = Some(leadership.token());
        expected.push(Some((id.clone(), leadership.token())));
        for observer in &observers {
            observer.come(expected.len()).await?;
        }
        let leader = elections[1].leader().await?;
        ensure!(
            leader.as_ref().map(|leader| (&*leader.id, leader.token)) == Some((&*id, leadership.token())),
            "{leadership:?} leads, and shown is {leader:?}"
        );
        leadership.resign().await?;
        expected.push(None);
    }
    for observer in &observers {
        observer.come(expected.len()).await?;
        let seen = observer.all();
        let known = |leader: &Leader| (leader.id.clone(), leader.token);
        let states: Vec<_> = seen.iter().map(|state| state.as_ref().map(known)).collect();
        ensure!(
            states == expected,
            "expected {expected:?}, an observer saw {states:?}"
        );
        let leaders = seen.iter().flatten();
        for (leader, (asked, granted)) in leaders.zip(&times) {
            ensure!(
                leader.began_before >= *asked && leader.began_after.is_some_and(|after| after <= *granted),
                "a leadership that began from {asked:?} to {granted:?} was seen as {leader:?}"
            );
        }
    }
    let late = within(
        PATIENCE,
        "a late observer is told who leads",
        elections[1].observe().next(),
    )
    .await??;
    ensure!(
        late.is_none(),
        "nobody leads, and an observer is told of {late:?}"
    );
    Ok(())
}

pub(crate) async fn leading_ends_with_a_loss(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let election = client.election(case.name("a"))?.with_ttl(case.harness.ttl());
    let candidate = election.candidate("one")?;
    let (begins, mut begun) = mpsc::unbounded_channel();
    let leading = tokio::spawn(async move {
        let mut terms = 0;
        candidate
            .lead(|held| {
                terms += 1;
                let (begins, is_last) = (begins.clone(), terms == 3);
                async move {
                    let dropped = begins.clone();
                    let _ = begins.send(held);
                    if is_last {
                        return ControlFlow::Break("done");
                    }
                    // The channel has another sender for as long as this future is there.
                    std::future::pending::<()>().await;
                    drop(dropped);
                    ControlFlow::Continue(())
                }
            })
            .await
    });
    let mut last = None;
    for term in 0..3 {
        let limit = case.detection(client.info()) + case.limits(&client).idle;
        let held = within(limit, "the candidate leads", begun.recv()).await?;
        let Some(held) = held else {
            return Err(failed("it leads no more"));
        };
        ensure!(
            Some(held.token()) > last,
            "{:?} came after {last:?}",
            held.token()
        );
        last = Some(held.token());
        if term < 2 {
            match case.harness.break_hold(election.lock_name().as_str()).await {
                Err(Error::Unsupported { what, .. }) if !client.capabilities().revoke => {
                    leading.abort();
                    return Err(Stop::Skipped(format!("nothing can break a hold: {what}")));
                }
                broken => broken?,
            }
            within(case.detection(client.info()), "the leader is told", held.lost()).await?;
        }
    }
    let done = within(PATIENCE, "the last term is over", leading)
        .await?
        .map_err(failed)??;
    ensure!(done == "done", "it returned {done}");
    Ok(())
}

pub(crate) async fn asked_leaders_are_followed(case: &CaseRun) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let [one, two] = clients.each_ref().map(|client| {
        let election = client.election(case.name("a"))?;
        Ok::<_, Error>(election.with_ttl(case.harness.ttl() * 2))
    });
    let (one, two) = (one?, two?);
    let leadership = leads_within(PATIENCE, "nobody leads", &one.candidate("one")?).await?;
    let observers = [Seen::by(one.observe()), Seen::by(two.observe())];
    for observer in &observers {
        observer.come(1).await?;
    }
    let (operator, name) = (clients[1].clone(), two.lock_name().clone());
    let token = leadership.token();
    let asking = tokio::spawn(async move { operator.revoke(name, token, crate::case_run::LIMIT).await });
    let limit = case.detection(clients[0].info()) + PROMPT;
    within(limit, "the leader is told", leadership.lost()).await?;
    let next = two.candidate("two")?;
    let waiter = tokio::spawn(async move { next.campaign().await });
    // The leader brings its work to an end.
    tokio::time::sleep(case.harness.ttl() / 10).await;
    ensure!(
        !waiter.is_finished(),
        "another leads while the leader that was asked has its leadership"
    );
    for observer in &observers {
        ensure!(
            observer.all().len() == 1,
            "the leader that was asked has its leadership, and an observer saw {observer:?}"
        );
    }
    drop(leadership);
    let limit = PATIENCE;
    let next = within(limit, "the leader let go", waiter)
        .await?
        .map_err(failed)??;
    let said = within(limit, "whoever asked gets an answer", asking).await?;
    let said = said.map_err(failed)??;
    ensure!(
        said == Revocation::Confirmed,
        "the leader let go in time, and whoever asked was told {said:?}"
    );
    let expected = [("one".to_owned(), token), ("two".to_owned(), next.token())];
    for observer in &observers {
        let leaders = || {
            let seen = observer.all().into_iter().flatten();
            seen.map(|leader| (leader.id, leader.token)).collect::<Vec<_>>()
        };
        let what = format!("an observer sees {expected:?}, and has seen {observer:?}");
        eventually(SEEN + PROMPT, &what, async || {
            Ok(leaders().len() >= expected.len())
        })
        .await?;
        ensure!(
            leaders() == expected,
            "expected {expected:?}, an observer saw {:?}",
            leaders()
        );
    }
    next.resign().await?;
    Ok(())
}

pub(crate) async fn elections_are_apart_from_locks(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let election = election(case, &client)?;
    let guard = granted_at_once("a lock nobody has used", &case.lock_of(&client, "a")?).await?;
    ensure!(
        election.leader().await?.is_none(),
        "the holder of a lock leads the election of its name"
    );
    let leadership = election.candidate("one")?.try_campaign().await?;
    let Some(leadership) = leadership else {
        return Err(failed("the lock of an election's name keeps others from leading"));
    };
    guard.release().await?;
    ensure!(
        leadership.is_held(),
        "releasing a lock ended the leadership of its name"
    );
    let lock = election.lock_name();
    for refused in [client.lock(lock).map(drop), client.election(lock).map(drop)] {
        ensure!(
            matches!(&refused, Err(Error::InvalidName { reason, .. }) if reason.contains("election")),
            "expected InvalidName for the name of an election's lock, got {refused:?}"
        );
    }
    let state = client.inspect(lock).await?;
    ensure!(
        state
            .holders
            .iter()
            .any(|holder| holder.token == leadership.token()),
        "{leadership:?} leads, and its lock shows {state:?}"
    );
    leadership.resign().await?;
    Ok(())
}

pub(crate) async fn killed_leaders_are_followed(case: &CaseRun) -> Outcome {
    let client = case.client().await?;
    let bound = case
        .freed_after_death_here(&client, &mut case.helper().await?)
        .await?;
    let mut stage = Stage::new(case, &client).await?;
    for _ in 0..3 {
        stage.join().await?;
    }
    stage.leader_after(0, PATIENCE).await?;
    stage.all_see_the_leader().await?;
    let mut waited = Vec::new();
    for _ in 0..rounds() {
        let killed = stage.kill_the_leader().await?;
        stage.join().await?;
        let began = stage.leader_after(killed, bound + PATIENCE).await?;
        let took = Duration::from_nanos(began.saturating_sub(killed));
        ensure!(
            took <= bound,
            "another led {took:?} after the leader was killed, expected within {bound:?}"
        );
        waited.push(took);
        stage.all_see_the_leader().await?;
    }
    stage.judge()?;
    waited.sort_unstable();
    if std::env::var_os(ROUNDS).is_some() {
        let (middle, last) = (waited.get(waited.len() / 2), waited.last());
        // Past libtest's capture.
        let _ = writeln!(
            std::io::stderr(),
            "{}: {} leaders were killed; another led after {middle:?} in the middle and {last:?} at most, of {bound:?}",
            client.info().name,
            waited.len()
        );
    }
    Ok(())
}

/// Three processes, each a candidate and an observer, and two observers of this process.
struct Stage<'a> {
    case: &'a CaseRun,
    members: BTreeMap<usize, Member>,
    joined: usize,
    heard: mpsc::UnboundedReceiver<(usize, String)>,
    said_to: mpsc::UnboundedSender<(usize, String)>,
    /// The terms, by the leaders' own words.
    terms: Vec<Term>,
    /// The tokens that each observer has seen; 0 for nobody.
    seen: BTreeMap<usize, Vec<u64>>,
}

struct Member {
    process: Process,
    /// A helper ends with its input.
    _commands: ChildStdin,
}

#[derive(Debug)]
struct Term {
    member: usize,
    token: u64,
    began: Nanos,
    /// The time at which the leader said so, or just before it was killed.
    ended: Option<Nanos>,
}

impl<'a> Stage<'a> {
    async fn new(case: &'a CaseRun, client: &LockClient) -> Result<Self, Stop> {
        let (said_to, heard) = mpsc::unbounded_channel();
        let other = case.client().await?;
        for (number, client) in [client, &other].into_iter().enumerate() {
            let mut observer = client.election(case.name("a"))?.observe();
            let said_to = said_to.clone();
            tokio::spawn(async move {
                loop {
                    let said = match observer.next().await {
                        Ok(Some(leader)) => format!("saw {} {}", leader.token, leader.id),
                        Ok(None) => "saw 0 nobody".to_owned(),
                        Err(error) if error.is_transient() => continue,
                        Err(error) => format!("error {error}"),
                    };
                    if said_to.send((number, said)).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            case,
            members: BTreeMap::new(),
            joined: 2,
            heard,
            said_to,
            terms: Vec::new(),
            seen: BTreeMap::from([(0, Vec::new()), (1, Vec::new())]),
        })
    }

    /// Starts another process.
    async fn join(&mut self) -> Outcome {
        let mut helper = self.case.helper().await?;
        let number = self.joined;
        self.joined += 1;
        let ttl = self.case.harness.ttl().as_millis();
        helper.send(&format!("elect member-{number} {ttl} {}", self.case.name("a")))?;
        let (process, commands, mut answers) = helper.parts();
        let said_to = self.said_to.clone();
        tokio::spawn(async move {
            while let Some(said) = answers.recv().await {
                if said_to.send((number, said)).is_err() {
                    return;
                }
            }
        });
        self.seen.insert(number, Vec::new());
        let member = Member {
            process,
            _commands: commands,
        };
        self.members.insert(number, member);
        Ok(())
    }

    /// Hears one word of somebody. Returns `false` at the deadline.
    async fn hear(&mut self, deadline: Instant) -> Result<bool, Stop> {
        let Ok(Some((member, said))) = timeout_at(deadline, self.heard.recv()).await else {
            return Ok(false);
        };
        let words: Vec<_> = said.split(' ').collect();
        let number = |word: &str| word.parse::<u64>().map_err(failed);
        match words[..] {
            ["stands"] => {}
            ["leads", token, at] => self.terms.push(Term {
                member,
                token: number(token)?,
                began: number(at)?,
                ended: None,
            }),
            ["ends", token, at] => {
                let (token, at) = (number(token)?, number(at)?);
                let term = self.terms.iter_mut().find(|term| term.token == token);
                let Some(term) = term else {
                    return Err(failed(format!("a term ended that did not begin: {said}")));
                };
                term.ended.get_or_insert(at);
            }
            // The last words of one who is dead do not count.
            ["saw", token, _] => {
                let token = number(token)?;
                if let Some(seen) = self.seen.get_mut(&member) {
                    seen.push(token);
                }
            }
            _ => return Err(failed(format!("member {member} said `{said}`"))),
        }
        Ok(true)
    }

    /// Returns the term that goes on.
    fn leader(&self) -> Option<&Term> {
        self.terms.iter().rfind(|term| term.ended.is_none())
    }

    /// Waits until somebody says that it leads, and returns since when.
    async fn leader_after(&mut self, killed: Nanos, limit: Duration) -> Result<Nanos, Stop> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(leader) = self.leader() {
                return Ok(leader.began);
            }
            ensure!(
                self.hear(deadline).await?,
                "nobody leads {limit:?} after {killed}: {:?}, {:?}",
                self.terms,
                self.seen
            );
        }
    }

    /// Waits until every observer has seen who leads.
    async fn all_see_the_leader(&mut self) -> Outcome {
        let limit = SEEN + PROMPT * 10;
        let deadline = Instant::now() + limit;
        loop {
            let token = self.leader().map(|leader| leader.token);
            if self.seen.values().all(|seen| seen.last().copied() == token) {
                return Ok(());
            }
            ensure!(
                self.hear(deadline).await?,
                "not all have seen within {limit:?} that {:?} leads: {:?}",
                self.leader(),
                self.seen
            );
        }
    }

    /// Returns when the leader was dead.
    async fn kill_the_leader(&mut self) -> Result<Nanos, Stop> {
        // A leader that has lost its leadership has said so by now.
        while self.hear(Instant::now()).await? {}
        let Some(term) = self.terms.iter_mut().rfind(|term| term.ended.is_none()) else {
            return Err(failed("there is no leader to kill"));
        };
        term.ended = Some(now());
        let member = term.member;
        let Some(mut leader) = self.members.remove(&member) else {
            return Err(failed(format!("member {member} leads, and is dead")));
        };
        tokio::task::block_in_place(|| leader.process.kill())?;
        self.seen.remove(&member);
        Ok(now())
    }

    /// Judges all that was said and seen.
    fn judge(&mut self) -> Outcome {
        let Self { terms, seen, .. } = self;
        terms.sort_unstable_by_key(|term| term.began);
        for pair in terms.windows(2) {
            if pair[0].ended.is_none_or(|ended| ended > pair[1].began) {
                let both = format!(
                    "two lead at once, by their own words: {:?} and {:?}",
                    pair[0], pair[1]
                );
                return Err(failed(both).whatever_the_machine_did());
            }
            if pair[0].token >= pair[1].token {
                let both = format!("tokens go back: {:?}, and then {:?}", pair[0], pair[1]);
                return Err(failed(both).whatever_the_machine_did());
            }
        }
        let tokens: Vec<_> = terms.iter().map(|term| term.token).collect();
        for (observer, seen) in &*seen {
            let leaders: Vec<_> = seen.iter().copied().filter(|token| *token > 0).collect();
            let twice = seen.windows(2).find(|pair| pair[0] == pair[1]);
            ensure!(
                twice.is_none(),
                "observer {observer} saw {twice:?} twice in a row"
            );
            ensure!(
                !leaders.is_empty() && tokens.ends_with(&leaders),
                "{tokens:?} led, and observer {observer} saw {leaders:?}"
            );
        }
        let all = seen
            .get(&0)
            .map(|seen| seen.iter().filter(|token| **token > 0).count());
        ensure!(
            all == Some(tokens.len()),
            "{} terms, of which the observer who was there from the beginning saw {all:?}",
            tokens.len()
        );
        Ok(())
    }
}
