//! Holds on a machine that is suspended, as far as these processes can tell: each moves into a time namespace with a later boot
//! time. It sees what a process sees whose machine has slept: a monotonic clock that stood still, and a boot-time clock that
//! went on.
//!
//! A test binary of its own, without libtest: the kernel lets a process of one thread alone change its clocks. Each
//! case runs in a process of its own. It takes Linux 5.6 and `unshare`, and either root or user namespaces.

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("only Linux tells how long it has slept: see docs/guarantees.md");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        fs::File,
        io::{BufRead, BufReader},
        os::fd::AsFd,
        pin::Pin,
        process::{Child, Command, Stdio},
        sync::{
            Arc,
            atomic::{AtomicU64, AtomicUsize, Ordering},
        },
        time::Duration,
    };

    use async_trait::async_trait;
    use lockkit_core::{
        AcquireOptions, Error, HoldEnd, Lock, LockClient, LockGuard, LockKind, LockName, LockState,
        LossReason, MemoryBackend, Result,
        memory::FaultPoint,
        spi::{Backend, BackendInfo, Claim, ClaimRequest, Grant, Renewal},
    };
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    use tokio::time::{Instant, sleep};

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);
    const TTL: Duration = Duration::from_secs(30);

    /// The variable that names the case of this process.
    const CASE: &str = "LOCKKIT_SUSPENDED_CASE";

    type Case = fn() -> Pin<Box<dyn Future<Output = ()>>>;

    macro_rules! cases {
        ($($case:ident),* $(,)?) => {
            [$((stringify!($case), (|| Box::pin($case())) as Case)),*]
        };
    }

    pub(super) fn main() {
        let cases = cases![
            a_lease_that_is_over_by_boot_time_is_lost_at_any_look,
            a_worker_looks_before_it_renews,
            what_is_slept_is_taken_off_the_lease,
            a_proof_from_before_the_sleep_is_no_longer_than_it_was,
            a_grant_that_was_slept_through_is_none,
            a_hold_that_slept_is_renewed_before_it_is_handed_on,
            leases_in_this_process_sleep_along,
            what_is_slept_counts_for_max_hold_everywhere,
        ];
        if let Ok(name) = std::env::var(CASE) {
            let (_, case) = cases.iter().find(|(case, _)| *case == name).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build();
            let in_time = async { tokio::time::timeout(600 * SECOND, case()).await };
            runtime.unwrap().block_on(in_time).expect("it is told in time");
            return;
        }
        let filters: Vec<_> = std::env::args().skip(1).collect();
        if filters.iter().any(|arg| arg == "--list") {
            for (name, _) in &cases {
                println!("suspended::{name}: test");
            }
            return;
        }
        let filters: Vec<_> = filters.iter().filter(|arg| !arg.starts_with('-')).collect();
        let mut failed = 0;
        for (name, _) in &cases {
            let name = format!("suspended::{name}");
            if filters.is_empty() || filters.iter().any(|filter| name.contains(*filter)) {
                let passed = run(&name);
                println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
                failed += usize::from(!passed);
            }
        }
        assert_eq!(failed, 0, "cases have failed");
    }

    /// Runs a case in a process of its own.
    fn run(name: &str) -> bool {
        let me = std::env::current_exe().unwrap();
        let mut command = if rustix::process::geteuid().is_root() {
            Command::new(me)
        } else {
            // It needs the right to change its clocks.
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user"]).arg(me);
            command
        };
        let case = name.rsplit("::").next().unwrap();
        command.env(CASE, case).status().unwrap().success()
    }

    /// Suspends the machine, as far as this process can tell.
    fn suspend(machine: Duration) {
        static ASLEEP: AtomicU64 = AtomicU64::new(0);
        let before = asleep();
        let total = ASLEEP.fetch_add(machine.as_secs(), Ordering::SeqCst) + machine.as_secs();
        let namespace = Namespace::new(total);
        let link = File::open(format!("/proc/{}/ns/time_for_children", namespace.0.id())).unwrap();
        move_into_link_name_space(link.as_fd(), Some(LinkNameSpaceType::Time)).unwrap();
        let slept = asleep().saturating_sub(before);
        assert!(
            slept + MS >= machine && slept < machine + SECOND,
            "the boot-time clock went on by {slept:?} more"
        );
    }

    /// The time by which the boot-time clock is ahead of the monotonic one.
    fn asleep() -> Duration {
        use rustix::time::{ClockId, clock_gettime};
        let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap();
        let monotonic = read(ClockId::Monotonic);
        read(ClockId::Boottime).saturating_sub(monotonic)
    }

    /// A process that has made a time namespace for its children.
    struct Namespace(Child);

    impl Namespace {
        /// One in which the machine has slept for so many seconds more than outside.
        fn new(seconds: u64) -> Self {
            let mut child = Command::new("unshare")
                .args(["--time", "--boottime", &seconds.to_string()])
                .args(["sh", "-c", "echo made; read wait"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("`unshare` of util-linux");
            let mut output = BufReader::new(child.stdout.take().unwrap());
            let namespace = Self(child);
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            assert_eq!(line, "made\n", "a time namespace can be made here");
            namespace
        }
    }

    impl Drop for Namespace {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    async fn a_lease_that_is_over_by_boot_time_is_lost_at_any_look() {
        type Look = fn(LockGuard) -> Pin<Box<dyn Future<Output = Result<()>>>>;
        let looks: [(&str, Look); 10] = [
            ("is_held", |guard| {
                Box::pin(async move { if guard.is_held() { Ok(()) } else { guard.check() } })
            }),
            ("check", |guard| Box::pin(async move { guard.check() })),
            ("a view", |guard| {
                Box::pin(async move {
                    if guard.view().is_held() {
                        Ok(())
                    } else {
                        guard.view().check()
                    }
                })
            }),
            ("renew", |guard| Box::pin(async move { guard.renew().await })),
            ("release", |guard| Box::pin(guard.release())),
            ("lost", |guard| {
                Box::pin(async move {
                    assert_eq!(guard.lost().await, LossReason::Expired);
                    guard.check()
                })
            }),
            ("lost's reason", |guard| {
                Box::pin(async move {
                    assert_eq!(guard.lost().reason(), Some(LossReason::Expired));
                    guard.check()
                })
            }),
            ("ended", |guard| {
                Box::pin(async move {
                    assert_eq!(guard.ended().await, HoldEnd::Lost(LossReason::Expired));
                    guard.check()
                })
            }),
            ("renewal_failing", |guard| {
                Box::pin(async move {
                    assert_eq!(guard.renewal_failing().await, Duration::ZERO);
                    guard.check()
                })
            }),
            ("run", |guard| {
                Box::pin(async move {
                    let work = async { panic!("this is not to be run") };
                    guard.run(work).await.map_err(Error::from)
                })
            }),
        ];
        for (what, look) in looks {
            let elsewhere = Elsewhere::default();
            let guard = elsewhere.lock("a").acquire().await.unwrap();
            sleep(SECOND).await;
            assert!(guard.is_held());
            suspend(40 * SECOND);
            let looked = Instant::now();
            let outcome = look(guard).await;
            assert!(
                matches!(
                    &outcome,
                    Err(Error::Lost {
                        reason: LossReason::Expired,
                        ..
                    })
                ),
                "{what}: {outcome:?}"
            );
            assert_eq!(looked.elapsed(), Duration::ZERO, "{what} tells at once");
            assert_eq!(elsewhere.renewals(), 0, "{what}: something was sent first");
        }
    }

    async fn a_worker_looks_before_it_renews() {
        let elsewhere = Elsewhere::default();
        let guard = elsewhere.lock("a").acquire().await.unwrap();
        let told = tokio::spawn(guard.lost());
        sleep(SECOND).await;
        suspend(40 * SECOND);
        assert_eq!(told.await.unwrap(), LossReason::Expired);
        assert_eq!(elsewhere.renewals(), 0);
    }

    async fn what_is_slept_is_taken_off_the_lease() {
        let elsewhere = Elsewhere::default();
        let guard = elsewhere.lock("a").acquire().await.unwrap();
        let left = || guard.valid_until().unwrap() - Instant::now();
        assert!(left() > 29 * SECOND);
        for slept in [5, 10] {
            suspend(5 * SECOND);
            assert!(guard.is_held());
            let expected = TTL.saturating_sub(slept * SECOND);
            assert!(left() <= expected && left() + SECOND > expected, "{:?}", left());
        }
        guard.renew().await.unwrap();
        assert!(left() > 29 * SECOND, "{:?} after a renewal", left());
        suspend(29 * SECOND);
        assert!(guard.is_held());
        suspend(SECOND);
        assert!(!guard.is_held());
    }

    async fn a_proof_from_before_the_sleep_is_no_longer_than_it_was() {
        let elsewhere = Elsewhere::default();
        let guard = elsewhere.lock("a").acquire().await.unwrap();
        sleep(5 * SECOND).await;
        suspend(15 * SECOND);
        // As of a session that was last heard of before the machine slept.
        elsewhere.proofs_are_old_by(3 * SECOND);
        guard.renew().await.unwrap();
        let left = guard.valid_until().unwrap() - Instant::now();
        assert!(left <= 12 * SECOND && left > 11 * SECOND, "{left:?}");
    }

    async fn a_grant_that_was_slept_through_is_none() {
        let elsewhere = Elsewhere::default();
        elsewhere.memory.delay(FaultPoint::Attempt, SECOND);
        let lock = elsewhere.lock("a");
        let asleep = async {
            sleep(SECOND / 2).await;
            suspend(40 * SECOND);
        };
        let (tried, ()) = tokio::join!(lock.try_acquire(), asleep);
        assert!(tried.unwrap_err().is_transient());
        // Asked again, it is granted with a lease of its own.
        let guard = lock.acquire_timeout(5 * SECOND).await.unwrap();
        assert!(guard.is_held());
    }

    async fn a_hold_that_slept_is_renewed_before_it_is_handed_on() {
        let elsewhere = Elsewhere::default();
        let lock = elsewhere.lock("a");
        let first = lock.acquire().await.unwrap();
        let heir = tokio::spawn(async move { lock.acquire().await.unwrap() });
        tokio::task::yield_now().await;
        suspend(12 * SECOND);
        first.release().await.unwrap();
        let heir = heir.await.unwrap();
        assert_eq!(elsewhere.renewals(), 1);
        assert!(heir.valid_until().unwrap() - Instant::now() > 29 * SECOND);
    }

    async fn leases_in_this_process_sleep_along() {
        let guard = LockClient::new(MemoryBackend::new())
            .lock("a")
            .unwrap()
            .acquire()
            .await
            .unwrap();
        suspend(3_600 * SECOND);
        assert!(guard.is_held());
        assert!(guard.valid_until().unwrap() - Instant::now() > 29 * SECOND);
    }

    async fn what_is_slept_counts_for_max_hold_everywhere() {
        let options = AcquireOptions::new().ttl(TTL).max_hold(60 * SECOND);
        let here = LockClient::new(MemoryBackend::new()).lock("a").unwrap();
        for lock in [here, Elsewhere::default().lock("a")] {
            let guard = lock.acquire_with(&options).await.unwrap();
            let warned = tokio::spawn(guard.renewal_failing());
            for _ in 0..2 {
                sleep(11 * SECOND).await;
                suspend(15 * SECOND);
                assert!(guard.is_held());
            }
            // That makes 52 s, of which 22 s were awake.
            assert!(!warned.is_finished());
            sleep(9 * SECOND).await;
            assert!(warned.is_finished(), "its time was over by now");
            guard.renew().await.unwrap_err();
            assert_eq!(guard.lost().await, LossReason::MaxHold);
        }
    }

    /// Memory, for a server on another machine, which does not sleep.
    #[derive(Clone, Debug, Default)]
    struct Elsewhere {
        memory: MemoryBackend,
        renewals: Arc<AtomicUsize>,
        /// The age of a renewal's proof at the time of the request, in milliseconds.
        proofs_are_old_by: Arc<AtomicU64>,
    }

    impl Elsewhere {
        fn lock(&self, name: &str) -> Lock {
            let lock = LockClient::new(self.clone()).lock(name).unwrap();
            lock.with_options(AcquireOptions::new().ttl(TTL))
        }

        fn renewals(&self) -> usize {
            self.renewals.load(Ordering::SeqCst)
        }

        fn proofs_are_old_by(&self, age: Duration) {
            self.proofs_are_old_by
                .store(age.as_secs() * 1_000, Ordering::SeqCst);
        }
    }

    #[async_trait]
    impl Backend for Elsewhere {
        fn info(&self) -> BackendInfo {
            let mut info = self.memory.info();
            info.leases_stand_still = false;
            info
        }

        async fn claim(&self, request: &ClaimRequest) -> Result<Box<dyn Claim>> {
            let claim = self.memory.claim(request).await?;
            let elsewhere = self.clone();
            Ok(Box::new(ElsewhereClaim { claim, elsewhere }))
        }

        async fn inspect(&self, name: &LockName, kind: LockKind) -> Result<LockState> {
            self.memory.inspect(name, kind).await
        }

        async fn close(&self) -> Result<()> {
            self.memory.close().await
        }
    }

    #[derive(Debug)]
    struct ElsewhereClaim {
        claim: Box<dyn Claim>,
        elsewhere: Elsewhere,
    }

    #[async_trait]
    impl Claim for ElsewhereClaim {
        async fn attempt(&mut self, patience: Duration) -> Result<Option<Grant>> {
            self.claim.attempt(patience).await
        }

        async fn renew(&mut self) -> Result<Renewal> {
            self.elsewhere.renewals.fetch_add(1, Ordering::SeqCst);
            let mut renewal = self.claim.renew().await;
            if let Ok(Renewal::Held(lease)) = &mut renewal {
                let age = self.elsewhere.proofs_are_old_by.load(Ordering::SeqCst);
                lease.since -= Duration::from_millis(age);
            }
            renewal
        }

        async fn release(&mut self) -> Result<()> {
            self.claim.release().await
        }

        async fn notified(&mut self) {
            self.claim.notified().await;
        }
    }
}
