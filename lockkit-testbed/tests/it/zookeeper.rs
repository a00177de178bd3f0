use lockkit_testbed::{
    skipped,
    zookeeper::{self, ZkEnsemble, ZkServer},
};

use crate::until::until;

fn no_zookeeper() -> bool {
    skipped("zk", zookeeper::missing())
}

#[test]
fn it_answers_is_killed_and_comes_back() {
    if no_zookeeper() {
        return;
    }
    let server = ZkServer::builder().used("/locks", 41).start().unwrap();
    assert!(server.word("srvr").unwrap().contains("Mode: standalone"));
    assert_eq!(server.figure("zk_watch_count").unwrap(), 0);
    // The root, `/zookeeper` with its two children, and the directory.
    assert_eq!(
        server.figure("zk_znode_count").unwrap(),
        6,
        "{:?}",
        server.figures()
    );
    assert_eq!(server.nodes().unwrap(), ["/locks"]);
    assert_eq!(
        server.sessions().unwrap(),
        [],
        "that look was in a session of its own"
    );
    assert!(server.figure("no such figure").is_err());
    server.kill().unwrap();
    assert!(server.word("srvr").is_err());
    server.start().unwrap();
    assert!(server.word("srvr").unwrap().contains("Mode: standalone"));
    assert!(!server.end_session(0x1234).unwrap(), "there is no such session");
}

#[test]
fn a_configuration_it_does_not_know_shows_in_the_error() {
    if no_zookeeper() {
        return;
    }
    let error = ZkServer::builder()
        .directive("clientPort=none")
        .start()
        .unwrap_err()
        .to_string();
    assert!(error.contains("has ended") && error.contains("none"), "{error}");
}

#[test]
fn members_are_cut_off_and_a_new_leader_is_elected() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ZkEnsemble::start().unwrap();
    let mode = |member: usize| ensemble.member(member).word("srvr").unwrap_or_default();
    let leader = ensemble.leader().unwrap();
    let follower = (0..3).find(|member| *member != leader).unwrap();
    assert!(mode(follower).contains("Mode: follower"), "{}", mode(follower));

    ensemble.cut(follower);
    until("a follower without a leader stops serving", || {
        !mode(follower).contains("Mode:")
    });
    assert!(mode(leader).contains("Mode: leader"), "it has one follower left");
    ensemble.mend().unwrap();
    assert_eq!(ensemble.leader().unwrap(), leader);

    ensemble.cut(leader);
    let new = ensemble.new_leader(leader).unwrap();
    assert_ne!(new, leader);
    ensemble.mend().unwrap();
    until("the old leader follows", || {
        mode(leader).contains("Mode: follower")
    });

    ensemble.member(new).kill().unwrap();
    let third = ensemble.new_leader(new).unwrap();
    assert_ne!(third, new);
    ensemble.member(new).start().unwrap();

    // A test that failed leaves more than one thing undone.
    ensemble.member(0).kill().unwrap();
    ensemble.member(1).pause().unwrap();
    ensemble.cut(2);
    ensemble.heal().unwrap();
    assert!((0..3).all(|member| mode(member).contains("Mode:")));
}

#[test]
fn a_leader_that_is_cut_off_is_not_elected_again() {
    if no_zookeeper() {
        return;
    }
    let ensemble = ZkEnsemble::start().unwrap();
    // With the highest number it wins every election that it takes part in.
    let last = ensemble.members().len() - 1;
    let leader = ensemble.leader().unwrap();
    if leader != last {
        ensemble.member(leader).kill().unwrap();
        assert_eq!(ensemble.new_leader(leader).unwrap(), last);
        ensemble.member(leader).start().unwrap();
    }
    let others = || ensemble.members()[..last].iter();

    ensemble.cut(last);
    others().for_each(|member| member.pause().unwrap());
    until("the leader gives up before its followers do", || {
        !ensemble.member(last).word("srvr").unwrap().contains("Mode:")
    });
    let followed = ensemble.followed(last);
    others().for_each(|member| member.resume().unwrap());
    let new = ensemble.new_leader(last).unwrap();
    assert_ne!(new, last);
    assert_eq!(ensemble.followed(last), followed, "it was elected meanwhile");
    ensemble.mend().unwrap();
    assert_eq!(ensemble.leader().unwrap(), new);
}
