//! MariaDB and MySQL, in both modes.

use std::{io, time::Duration};

use async_trait::async_trait;
use lockkit::{LockClient, Result};
use lockkit_conformance::torture::{Fault, Strike, Target, Told};
use lockkit_testbed::{
    Clock, Proxy,
    mysql::{Flavour, MySql},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Row as _,
    mysql::{MySqlConnectOptions, MySqlSslMode},
};

use crate::wires::{Suffering, Wires, unknown};

#[derive(Debug)]
pub(crate) struct Database {
    primary: MySql,
    /// What becomes the primary in a planned change of roles.
    successor: MySql,
    lease: bool,
    clock: Clock,
    /// The successor's.
    _ahead: Clock,
    wires: Wires,
    suffering: Suffering,
}

/// Until a client is connected again, and a dead session is ended over another connection.
const RECOVERY: Duration = Duration::from_secs(10);
const AT_RENEWAL: Told = Told::AtRenewal(Duration::from_secs(3));

impl Database {
    pub(crate) fn start(flavour: Flavour, lease: bool) -> io::Result<Self> {
        let clock = Clock::new()?;
        let primary = MySql::start_by(Some(&clock), flavour, &[])?;
        // Past whatever the primary's counters may have run ahead of its own clock.
        let ahead = Clock::new()?;
        ahead.forward(Duration::from_hours(1))?;
        let successor = MySql::start_by(Some(&ahead), flavour, &[])?;
        let wires = Wires::to(&[primary.addr()], 3)?;
        let suffering = Suffering::default();
        Ok(Self {
            primary,
            successor,
            lease,
            clock,
            _ahead: ahead,
            wires,
            suffering,
        })
    }
}

/// Has the master account run something.
fn run(server: &MySql, sql: &str) -> io::Result<Vec<Vec<String>>> {
    let options = MySqlConnectOptions::new()
        .host(&server.addr().ip().to_string())
        .port(server.addr().port())
        .username("root")
        .database(MySql::DATABASE)
        .ssl_mode(MySqlSslMode::Disabled);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut connection = options.connect().await.map_err(io::Error::other)?;
        let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection).await;
        let text = |row: &sqlx::mysql::MySqlRow, index| {
            let bytes: Option<Vec<u8>> = row.try_get_unchecked(index).unwrap_or_default();
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        let rows = rows.map_err(io::Error::other)?;
        Ok(rows
            .iter()
            .map(|row| (0..row.len()).map(|index| text(row, index)).collect())
            .collect())
    })
}

#[async_trait]
impl Target for Database {
    fn routes(&self) -> Vec<String> {
        let parameters = if self.lease { "?mode=lease" } else { "" };
        let addrs = self.wires.0.iter().map(Proxy::addr);
        addrs
            .map(|addr| format!("{}{parameters}", MySql::url_at(addr)))
            .collect()
    }

    async fn connect(&self, route: &str) -> Result<LockClient> {
        lockkit::connect(route).await
    }

    fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<_> = self.wires.faults(RECOVERY).into();
        if !self.lease {
            for fault in &mut faults {
                *fault = match fault.name {
                    // The server frees a row at once.
                    "reset" | "refuse" | "lose" => {
                        fault.excuses_overlap(Told::Within(Duration::from_secs(2)))
                    }
                    "silence" => fault.excuses_overlap(Told::AtLeaseEnd(Duration::from_secs(1))),
                    _ => *fault,
                };
            }
        }
        let restart = Fault::new("restart").recovery(RECOVERY);
        let session = Fault::new("session").places(8).recovery(RECOVERY).weight(3);
        faults.extend([
            Fault::new("pause").recovery(RECOVERY),
            if self.lease {
                restart
            } else {
                restart.excuses_overlap(Told::Within(Duration::from_secs(3)))
            },
            if self.lease {
                session
            } else {
                session.excuses_overlap(AT_RENEWAL)
            },
            // A planned change of roles: the old primary is demoted, its connections stay.
            Fault::new("switch")
                .recovery(RECOVERY)
                .excuses_overlap(AT_RENEWAL)
                .lasting()
                .weight(4),
        ]);
        if self.lease {
            faults.push(
                Fault::new("clock")
                    .places(2)
                    .excuses_overlap(AT_RENEWAL)
                    .recovery(Duration::from_secs(20)),
            );
        } else {
            // It counts silence by another clock.
            faults.push(Fault::new("clock").places(1).recovery(RECOVERY));
        }
        faults
    }

    fn strike(&self, strike: &Strike, _: &[String]) -> io::Result<()> {
        if self.wires.strike(strike) {
            return Ok(());
        }
        let step = Duration::from_millis(strike.lasts.min(10_000));
        self.suffering.begin(0, strike, || match strike.fault.as_str() {
            "pause" => self.primary.process().pause(),
            "restart" => self.primary.process().kill().map(drop),
            "session" => {
                let sql = format!(
                    "SELECT CAST(ID AS CHAR) FROM information_schema.PROCESSLIST WHERE USER = '{}' ORDER BY ID",
                    MySql::USER
                );
                let ids = run(&self.primary, &sql)?;
                if let Some(id) = ids.get(strike.place as usize % ids.len().max(1)) {
                    // It may have ended meanwhile.
                    let _ = run(&self.primary, &format!("KILL {}", id.concat()));
                }
                Ok(())
            }
            "switch" => {
                run(&self.primary, "SET GLOBAL read_only = 1")?;
                for proxy in &self.wires.0 {
                    proxy.set_upstream(self.successor.addr());
                }
                Ok(())
            }
            "clock" if strike.place == 0 => self.clock.forward(step),
            "clock" => self.clock.back(step),
            _ => Err(unknown(strike)),
        })
    }

    fn heal(&self, strike: &Strike) -> io::Result<()> {
        if self.wires.heal(strike) {
            return Ok(());
        }
        self.suffering.end(0, strike, || match strike.fault.as_str() {
            "pause" => self.primary.process().resume(),
            "restart" => self.primary.start_again(),
            "switch" => {
                for proxy in &self.wires.0 {
                    proxy.set_upstream(self.primary.addr());
                    proxy.reset();
                }
                run(&self.primary, "SET GLOBAL read_only = 0").map(drop)
            }
            "clock" => self.clock.reset(),
            _ => Ok(()),
        })
    }
}
