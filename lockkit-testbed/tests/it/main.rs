//! Tests of the tools themselves: each really does what the tests of the backends rely on.

mod clock;
mod echo;
mod etcd;
mod mysql;
mod port;
mod postgres;
mod process;
mod proxy;
mod redis;
mod skip;
mod until;
mod zookeeper;
