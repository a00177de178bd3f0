//! Lists of many locks that are held: how long one takes, its memory, and what it costs others meanwhile.
//!
//! `cargo bench -p lockkit-benches --bench listing [-- redis|zookeeper]` starts a private Redis and a private ZooKeeper server, one
//! after the other, and holds 100,000 locks on each. `LOCKKIT_LISTED` is another number.

use std::process::Command;

use lockkit::BoxError;
use lockkit_benches::listing::{self, Listing};
use lockkit_testbed::{
    redis::{self, RedisServer},
    zookeeper::{self, ZkServer},
};
use tokio::runtime::Runtime;

const HELD: usize = 100_000;

fn main() -> Result<(), BoxError> {
    if let Some(url) = listing::told() {
        return listing::serve(&url);
    }
    let held = match std::env::var("LOCKKIT_LISTED") {
        Ok(held) => held.parse()?,
        Err(_) => HELD,
    };
    let texts: Vec<String> = std::env::args()
        .skip(1)
        .filter(|text| !text.starts_with("--"))
        .collect();
    let is_wanted = |server: &str| texts.is_empty() || texts.iter().any(|text| text == server);
    let measure = |url: &str| -> Result<Listing, BoxError> {
        let runtime = Runtime::new()?;
        let measured = runtime.block_on(listing::measure(
            url,
            held,
            Command::new(std::env::current_exe()?),
        ));
        runtime.shutdown_background();
        measured
    };
    match redis::missing() {
        _ if !is_wanted("redis") => {}
        Some(why) => println!("redis: skipped: {why}"),
        None => println!("redis: {}", measure(RedisServer::plain()?.url())?),
    }
    match zookeeper::missing() {
        _ if !is_wanted("zookeeper") => {}
        Some(why) => println!("zookeeper: skipped: {why}"),
        None => {
            let server = ZkServer::builder().large().start()?;
            println!("zookeeper: {}", measure(&format!("zk://{}", server.addr()))?);
        }
    }
    Ok(())
}
