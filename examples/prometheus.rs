//! Exports the metrics of a program to Prometheus.
//!
//! `cargo run --features metrics --example prometheus [URL]` takes and releases some locks, and prints what a scrape returns. Default:
//! `memory:`.

use std::{error::Error, time::Duration};

use lockkit::AcquireOptions;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

/// The bounds of the histograms' buckets in seconds: from a request to a server nearby to a hold that lasts for minutes.
const BUCKETS: [f64; 14] = [
    0.000_1, 0.000_25, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0,
];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    // Before the client acquires anything. A program that is scraped over HTTP says `.with_http_listener(…).install()` instead,
    // with the exporter's feature `http-listener`; or it returns `prometheus.render()` from the HTTP server that it has.
    let prometheus = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()?;

    let client = lockkit::connect(&url).await?;
    let lock = client.lock("report")?;
    let tasks = (0..8).map(|_| {
        let lock = lock.clone();
        tokio::spawn(async move {
            let guard = lock.acquire().await?;
            tokio::time::sleep(Duration::from_millis(2)).await;
            guard.release().await
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await??;
    }
    // One that is held while the metrics are scraped, one that found it taken, and one that waits.
    let ttl = AcquireOptions::new().ttl(Duration::from_secs(3));
    let held = lock.acquire_with(&ttl).await?;
    assert!(lock.try_acquire().await?.is_none());
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await?.release().await }
    });
    // Long enough for a renewal, after a third of the ttl.
    tokio::time::sleep(Duration::from_millis(1_200)).await;

    let scraped = prometheus.render();
    println!("{scraped}");
    for line in [
        "lockkit_holds{backend=",
        "lockkit_waiters{backend=",
        "lockkit_renewal_seconds_count{backend=",
    ] {
        let found = scraped.lines().find(|found| found.starts_with(line));
        assert!(
            found.is_some_and(|found| found.ends_with(" 1")),
            "{line}: {found:?}"
        );
    }

    held.release().await?;
    waiting.await??;
    client.close(Duration::from_secs(5)).await?;
    Ok(())
}
