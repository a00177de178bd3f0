//! Values on their way through serde: dashboards and logs read them, so their form is fixed.

use std::{
    fmt::Debug,
    time::{Duration, UNIX_EPOCH},
};

use lockkit_core::{DetachedHold, FencingToken, HoldEnd, Holder, LockKind, LockName, LockState, LossReason};
use serde::{Serialize, de::DeserializeOwned};

fn is_written_as<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, json: &str) {
    assert_eq!(serde_json::to_string(value).unwrap(), json);
    assert_eq!(&serde_json::from_str::<T>(json).unwrap(), value, "read back");
}

#[test]
fn every_value_has_one_form_and_is_read_back() {
    is_written_as(&FencingToken::new(u64::MAX), "18446744073709551615");
    is_written_as(&LockKind::Lock, r#""lock""#);
    is_written_as(&LockKind::Semaphore, r#""semaphore""#);
    is_written_as(&LockName::new("é\n🔒").unwrap(), r#""é\n🔒""#);
    is_written_as(&HoldEnd::Released, r#""released""#);
    is_written_as(&HoldEnd::Detached, r#""detached""#);
    for (reason, json) in [
        (LossReason::Expired, r#""expired""#),
        (LossReason::Revoked, r#""revoked""#),
        (LossReason::Disconnected, r#""disconnected""#),
        (LossReason::MaxHold, r#""max_hold""#),
        (LossReason::Asked, r#""asked""#),
        (LossReason::Gone, r#""gone""#),
    ] {
        is_written_as(&reason, json);
        is_written_as(&HoldEnd::Lost(reason), &format!(r#"{{"lost":{json}}}"#));
    }
    let left = Duration::from_millis(1_500);
    let holder = Holder::new(FencingToken::new(34), Some("me".into()), Some(left));
    let holder = holder.since(Some(UNIX_EPOCH + left));
    let unknown = Holder::new(FencingToken::new(35), None, None);
    is_written_as(
        &LockState::new(vec![holder, unknown], Some(2)),
        concat!(
            r#"{"holders":[{"label":"me","token":34,"left":{"secs":1,"nanos":500000000},"#,
            r#""since":{"secs_since_epoch":1,"nanos_since_epoch":500000000}},"#,
            r#"{"label":null,"token":35,"left":null,"since":null}],"waiters":2}"#
        ),
    );
    is_written_as(&LockState::default(), r#"{"holders":[],"waiters":null}"#);
}

/// It is one text, so that it fits wherever a text does.
#[test]
fn a_detached_hold_is_written_as_its_text() {
    let json = r#""1:p3:30000:34:feed0000000000000000000000000001:8:gpu%0a:7""#;
    let detached: DetachedHold = serde_json::from_str(json).unwrap();
    assert_eq!(detached.name().as_str(), "gpu\n:7");
    assert_eq!(serde_json::to_string(&detached).unwrap(), json);
    let err = serde_json::from_str::<DetachedHold>(r#""1:x:30000:34:feed:a""#).unwrap_err();
    assert!(!err.to_string().contains("feed"), "{err}");
}

#[test]
fn what_an_older_version_has_not_written_is_unknown() {
    let state: LockState = serde_json::from_str(r#"{"holders":[{"token":1}]}"#).unwrap();
    let expected = Holder::new(FencingToken::new(1), None, None);
    assert_eq!(state, LockState::new(vec![expected], None));
}

#[test]
fn what_is_no_value_is_refused() {
    assert!(serde_json::from_str::<LockName>(r#""""#).is_err());
    let long = serde_json::to_string(&"x".repeat(LockName::MAX_BYTES + 1)).unwrap();
    let err = serde_json::from_str::<LockName>(&long).unwrap_err();
    assert!(err.to_string().contains("longer than 1,024 bytes"), "{err}");
    assert!(serde_json::from_str::<FencingToken>("-1").is_err());
    assert!(serde_json::from_str::<LockKind>(r#""latch""#).is_err());
    assert!(
        serde_json::from_str::<LockState>("{}").is_err(),
        "not even who holds"
    );
}
