//! Servers of etcd.

use std::{net::TcpStream, process::Command, sync::Arc, time::Duration};

use lockkit_testbed::{
    Certificates,
    etcd::{self, EtcdCluster, EtcdServer},
    skipped,
};

use crate::until::until;

fn no_etcd() -> bool {
    skipped("etcd", etcd::missing())
}

/// A cluster that elects quickly.
fn cluster() -> EtcdCluster {
    let options = EtcdServer::builder().election_timeout(Duration::from_millis(500));
    EtcdCluster::start_with(options).unwrap()
}

#[test]
fn it_dies_and_comes_up_again_with_or_without_its_data() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let addr = server.addr();
    server.ctl(&["put", "a/1", "one"]).unwrap();
    server.ctl(&["put", "b/1", "other"]).unwrap();
    assert_eq!(server.keys("a/").unwrap(), ["a/1"]);
    let revision = server.revision().unwrap();
    server.kill().unwrap();
    assert_eq!(server.pid(), None);
    assert!(server.healthy().is_err());

    server.start().unwrap();
    assert_eq!(server.addr(), addr);
    assert_eq!(server.ctl(&["get", "--print-value-only", "a/1"]).unwrap(), "one");
    assert_eq!(server.revision().unwrap(), revision);
    assert!(server.delete("a/1").unwrap());
    assert!(!server.delete("a/1").unwrap());
    assert_eq!(server.revision().unwrap(), revision + 1);

    server.start_empty().unwrap();
    assert_eq!(server.keys("").unwrap(), Vec::<String>::new());
    assert!(server.revision().unwrap() < revision);
}

#[test]
fn a_paused_server_answers_nobody_until_it_goes_on() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    server.pause().unwrap();
    let asked = server.ctl(&["get", "--command-timeout=500ms", "a"]);
    assert!(asked.unwrap_err().to_string().contains("deadline"));
    server.resume().unwrap();
    server.ctl(&["get", "a"]).unwrap();
}

#[test]
fn leases_are_revoked_and_history_is_compacted() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::builder()
        .election_timeout(Duration::from_millis(100))
        .start()
        .unwrap();
    let granted = server.ctl(&["lease", "grant", "60"]).unwrap();
    let [lease] = &server.leases().unwrap()[..] else {
        panic!("one lease");
    };
    assert!(granted.contains(lease), "{granted}");
    server
        .ctl(&["put", &format!("--lease={lease}"), "a", "1"])
        .unwrap();
    server.revoke(lease).unwrap();
    assert_eq!(server.keys("a").unwrap(), Vec::<String>::new());
    assert!(server.revoke(lease).is_err(), "it is gone");

    let shortest = server.ctl(&["lease", "grant", "1"]).unwrap();
    assert!(shortest.contains("TTL(1s)"), "{shortest}");

    let past = server.revision().unwrap() - 1;
    let then = format!("--rev={past}");
    assert!(server.ctl(&["get", "a", &then]).is_ok());
    server.compact().unwrap();
    let error = server.ctl(&["get", "a", &then]).unwrap_err().to_string();
    assert!(error.contains("compacted"), "{error}");
}

#[test]
fn locks_of_the_command_line_exclude_each_other() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    let mut first = server.lock("name", Duration::from_secs(30)).unwrap();
    let key = first.hear().unwrap();
    assert_eq!(server.keys("name/").unwrap(), [key]);
    let second = server.lock("name", Duration::from_secs(2)).unwrap();
    until("the second waits", || server.keys("name/").unwrap().len() == 2);
    assert!(second.is_silent_for(Duration::from_millis(300)));
    first.end().unwrap();
    let key = second.hear().unwrap();
    assert_eq!(server.keys("name/").unwrap(), [key.as_str()]);
    drop(second);
    assert_eq!(server.keys("name/").unwrap(), [key], "it is left to its lease");
    until("the lease ends", || server.keys("name/").unwrap().is_empty());
}

#[test]
fn a_password_is_asked_for_and_rights_are_kept() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::builder().authorise("locks/").start().unwrap();
    assert_eq!(
        server.url(),
        format!("etcd://lockkit:hush-4711-canary@{}", server.addr())
    );
    let user = format!("--user={}:{}", EtcdServer::USER, EtcdServer::PASSWORD);
    // The last of the two counts.
    let as_user = |what: &[&str]| server.ctl(&[&[user.as_str()], what].concat());
    as_user(&["put", "locks/a", "1"]).unwrap();
    let error = as_user(&["put", "others/a", "1"]).unwrap_err().to_string();
    assert!(error.contains("permission denied"), "{error}");
    let wrong = server
        .ctl(&["--user=lockkit:wrong", "get", "locks/a"])
        .unwrap_err()
        .to_string();
    assert!(wrong.contains("authentication failed"), "{wrong}");
    server.ctl(&["put", "others/a", "1"]).unwrap();
    server.start_empty().unwrap();
    assert!(as_user(&["put", "others/a", "1"]).is_err(), "it asks again");
}

#[test]
fn tls_is_served_and_a_certificate_can_be_asked_for() {
    if no_etcd() {
        return;
    }
    let certificates = Arc::new(Certificates::generate().unwrap());
    let open = EtcdServer::builder().tls(&certificates).start().unwrap();
    assert_eq!(open.url(), format!("etcd://{}", open.addr()));
    open.ctl(&["put", "a", "1"]).unwrap();
    // Without what the server says that it takes.
    let get = |server: &EtcdServer, scheme: &str| {
        let mut command = Command::new(server.ctl_command().get_program());
        command
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints={scheme}://{}", server.addr()))
            .arg(format!("--cacert={}", certificates.authority().display()))
            .args(["--command-timeout=2s", "get", "a"]);
        command.output().unwrap().status.success()
    };
    assert!(get(&open, "https") && !get(&open, "http"));

    let strict = EtcdServer::builder()
        .tls(&certificates)
        .client_certificates()
        .start()
        .unwrap();
    strict.ctl(&["put", "a", "1"]).unwrap();
    assert!(!get(&strict, "https"));
}

#[test]
fn one_that_does_not_come_up_says_why() {
    if no_etcd() {
        return;
    }
    let started = EtcdServer::builder().option("--no-such-option").start();
    let error = started.unwrap_err().to_string();
    assert!(
        error.contains("has ended") && error.contains("no-such-option"),
        "{error}"
    );
}

#[test]
fn members_are_cut_off_and_a_new_leader_is_elected() {
    if no_etcd() {
        return;
    }
    let cluster = cluster();
    let leader = cluster.leader().unwrap();
    let follower = (leader + 1) % 3;
    let put = |member: usize, key: &str| {
        let member = cluster.member(member);
        member.ctl(&["--command-timeout=3s", "put", key, "1"])
    };
    // What a member passes on to a leader that it has just lost or found may be lost, and is asked for again.
    let takes = |member: usize, key: &str| {
        until(&format!("member {member} takes {key}"), || {
            put(member, key).is_ok()
        });
    };
    takes(follower, "a");

    cluster.cut(follower);
    until("a follower without a leader serves no reads", || {
        cluster.member(follower).healthy().is_err()
    });
    assert!(put(follower, "b").is_err());
    takes(leader, "c");
    let stale = cluster
        .member(follower)
        .ctl(&["get", "--consistency=s", "c"])
        .unwrap();
    assert_eq!(stale, "", "nothing reaches it");
    cluster.mend().unwrap();
    takes(follower, "d");

    let leader = cluster.leader().unwrap();
    cluster.cut(leader);
    let new = cluster.new_leader(leader).unwrap();
    takes(new, "e");
    assert!(put(leader, "f").is_err());
    until("the old leader knows that it has lost", || {
        !cluster.member(leader).leads().unwrap()
    });
    cluster.mend().unwrap();
    assert_eq!(
        cluster
            .member(leader)
            .ctl(&["get", "--print-value-only", "e"])
            .unwrap(),
        "1"
    );

    let leader = cluster.leader().unwrap();
    cluster.member(leader).kill().unwrap();
    let third = cluster.new_leader(leader).unwrap();
    takes(third, "g");
    cluster.member(leader).start().unwrap();
    takes(leader, "h");

    // A test that failed leaves more than one thing undone.
    cluster.member(0).kill().unwrap();
    cluster.member(1).pause().unwrap();
    cluster.cut(2);
    cluster.heal().unwrap();
    for member in 0..3 {
        takes(member, "i");
    }
}

#[test]
fn a_follower_that_is_cut_off_renews_no_lease() {
    if no_etcd() {
        return;
    }
    let cluster = cluster();
    let follower = cluster.member((cluster.leader().unwrap() + 1) % 3);
    follower.ctl(&["lease", "grant", "60"]).unwrap();
    let lease = follower.leases().unwrap().remove(0);
    // It is the leader who renews it, and is asked on a connection of its own.
    let renew = || follower.ctl(&["--command-timeout=3s", "lease", "keep-alive", "--once", &lease]);
    assert!(renew().unwrap().contains("keepalived"));
    cluster.cut((cluster.leader().unwrap() + 1) % 3);
    let renewed = renew();
    assert!(renewed.as_ref().is_err(), "{renewed:?}");
    cluster.mend().unwrap();
    assert!(renew().unwrap().contains("keepalived"));
}

#[test]
fn a_member_is_replaced_and_all_are_emptied() {
    if no_etcd() {
        return;
    }
    let cluster = cluster();
    cluster.member(0).ctl(&["put", "a", "1"]).unwrap();
    let member = cluster.leader().unwrap();
    let lost = cluster.member(member);
    cluster.replace(member).unwrap();
    assert_eq!(lost.keys("a").unwrap(), ["a"], "it has what the others have");
    lost.kill().unwrap();
    lost.start().unwrap();
    assert_eq!(lost.keys("a").unwrap(), ["a"]);
    // One is enough besides it.
    cluster.member((member + 1) % 3).kill().unwrap();
    until("it takes part in a majority", || lost.healthy().is_ok());
    lost.ctl(&["put", "b", "1"]).unwrap();
    cluster.start_empty().unwrap();
    for member in cluster.members() {
        assert_eq!(member.keys("").unwrap(), Vec::<String>::new());
    }
    let addrs: Vec<_> = cluster.addrs().iter().map(ToString::to_string).collect();
    assert_eq!(cluster.url(), format!("etcd://{}", addrs.join(",")));
}

#[test]
fn figures_and_clients_are_told() {
    if no_etcd() {
        return;
    }
    let server = EtcdServer::plain().unwrap();
    assert_eq!(server.connections().unwrap(), []);
    let client = TcpStream::connect(server.addr()).unwrap();
    assert_eq!(server.connections().unwrap(), [client.local_addr().unwrap()]);
    drop(client);
    until("its end", || server.connections().unwrap().is_empty());
    assert!((server.figure("etcd_server_has_leader").unwrap() - 1.0).abs() < f64::EPSILON);
    assert!(server.figure("no_such_figure").is_err());
    assert!(server.leads().unwrap());
}
