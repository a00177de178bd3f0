//! The requirements on every lockkit backend, as tests that any implementation can run from its own crate.
//!
//! Implement [`Harness`] and have one `#[test]` per case generated:
//!
//! ```no_run
//! use async_trait::async_trait;
//! use lockkit_conformance::Harness;
//! use lockkit_core::{LockClient, MemoryBackend, Result};
//!
//! #[derive(Debug, Default)]
//! struct Memory(MemoryBackend);
//!
//! #[async_trait]
//! impl Harness for Memory {
//!     async fn client(&self) -> Result<LockClient> {
//!         Ok(LockClient::new(self.0.clone()))
//!     }
//! }
//!
//! mod memory {
//!     lockkit_conformance::tests!(super::Memory::default());
//! }
//! # fn main() {}
//! ```
//!
//! Cases that a backend's [`Capabilities`](lockkit_core::Capabilities) rule out are skipped, and say so on stderr; each
//! capability is asserted both ways, so that one denied must really be refused. Random cases print their seed when
//! they fail and replay it from `LOCKKIT_SEED`. A case that fails while the [machine](stall) stands still runs again. A
//! program runs the suite with [`Suite`].

#![cfg_attr(docsrs, feature(doc_cfg))]

mod case_run;
mod cases;
mod harness;
pub mod helper;
pub mod history;
pub mod measure;
mod order;
pub mod process;
pub mod stall;
mod suite;
pub mod torture;
mod traces;

pub use harness::{Harness, Missing, Outage, Way};
pub use suite::{Case, Report, Suite, Verdict, cases};
pub use traces::Traces;

#[doc(hidden)]
pub use order::grants_in_order;
#[doc(hidden)]
pub use suite::run_test;

/// Generates one `#[test]` per case for the backend that the expression, a [`Harness`], reaches, and a test
/// `helper_process`, as which the test program runs itself again where a case needs another process.
///
/// The expression is evaluated once per test; what is dear to make, such as a server, it shares through a static.
/// Use it once in a module.
#[macro_export]
macro_rules! tests {
    ($harness:expr) => {
        $crate::__for_each_case!([$crate::__tests] $harness =>);

        #[test]
        fn helper_process() {
            $crate::helper::as_test(&$harness, ::core::module_path!());
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ($harness:expr => $($module:ident :: $name:ident [$($need:ident),*] $doc:literal;)*) => {
        $(
            #[doc = $doc]
            #[test]
            fn $name() {
                $crate::run_test($harness, ::core::module_path!(), ::core::stringify!($name));
            }
        )*
    };
}
