//! The file backend, against the system calls that it cannot do without.

use std::{
    fs::{File, OpenOptions},
    io::{Seek, Write},
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use lockkit_benches::{duel, time_cycles};
use tokio::runtime::Builder;

/// One task, uncontended: a cycle with a durable token, against locking a file, writing a number, and syncing it.
fn uncontended(c: &mut Criterion) {
    let dir = std::env::temp_dir().join(format!("lockkit-bench-{}", std::process::id()));
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let url = format!("file://{}", dir.display());
    let lock = runtime
        .block_on(lockkit::connect(&url))
        .expect("a directory")
        .lock("name")
        .expect("a name");
    let path = dir.join("floor");
    let mut group = c.benchmark_group("file, uncontended");
    duel(
        &mut group,
        ("lockkit", |n| {
            time_cycles(&runtime, n, || async {
                lock.acquire()
                    .await
                    .expect("granted")
                    .release()
                    .await
                    .expect("released");
            })
        }),
        ("flock, write, fdatasync", |n| floor(&path, n)),
    );
    group.finish();
    std::fs::remove_dir_all(&dir).expect("removed");
}

fn floor(path: &std::path::Path, n: u64) -> Duration {
    let started = Instant::now();
    for token in 0..n {
        let file = File::create_new(path)
            .or_else(|_| File::open(path))
            .expect("opened");
        file.lock().expect("locked");
        let mut writer = OpenOptions::new().write(true).open(path).expect("opened");
        writer.rewind().expect("rewound");
        writer.write_all(&token.to_le_bytes()).expect("written");
        writer.sync_data().expect("synced");
        file.unlock().expect("unlocked");
    }
    started.elapsed()
}

criterion_group!(benches, uncontended);
criterion_main!(benches);
