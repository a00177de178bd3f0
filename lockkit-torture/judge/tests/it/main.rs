//! Histories by hand, each beside one that differs from it in what is planted.

use std::fmt::Write as _;

use lockkit_history_judge::{History, Law, judge};

const EPOCH: &str = "{\"at\":0,\"is\":\"epoch\",\"seed\":1,\"clock\":1000}\n";
const MS: u64 = 1_000_000;

/// A hold on `a`, in ms: asked for, granted, last seen to hold; and its token.
fn hold(text: &mut String, number: usize, (mode, of): (&str, u32), moments: [u64; 3], token: u64) {
    let [asked, granted, held] = moments.map(|moment| moment * MS);
    let call =
        format!("\"name\":\"a\",\"mode\":\"{mode}\",\"of\":{of},\"ttl\":300,\"process\":0,\"client\":0");
    let _ = writeln!(
        text,
        "{{\"at\":{asked},\"is\":\"call\",\"hold\":{number},{call}}}"
    );
    let _ = writeln!(
        text,
        "{{\"at\":{granted},\"is\":\"granted\",\"hold\":{number},\"token\":{token}}}"
    );
    let _ = writeln!(text, "{{\"at\":{held},\"is\":\"held\",\"hold\":{number}}}");
}

const X: (&str, u32) = ("exclusive", 1);
const S: (&str, u32) = ("shared", 0);

fn history(holds: &[((&str, u32), [u64; 3], u64)]) -> String {
    let mut text = EPOCH.to_owned();
    for (number, (mode, moments, token)) in holds.iter().enumerate() {
        hold(&mut text, number, *mode, *moments, *token);
    }
    text
}

/// The laws that the history breaks. The search has an end.
fn broken(text: &str) -> Vec<Law> {
    let history: History = text.parse().unwrap_or_else(|error| panic!("{error}"));
    let verdicts = judge(&history);
    assert!(
        verdicts.iter().all(|verdict| verdict.undecided.is_empty()),
        "{verdicts:?}"
    );
    verdicts
        .into_iter()
        .flat_map(|verdict| verdict.broken.into_keys())
        .collect()
}

#[test]
fn two_who_hold_at_once_are_found() {
    let pair = |until| [(X, [0, 1, until], 1), (X, [5, 20, 30], 2)];
    assert_eq!(broken(&history(&pair(19))), []);
    assert_eq!(broken(&history(&pair(21))), [Law::Exclusion]);
    let readers = [(S, [0, 1, 21], 1), (S, [5, 20, 30], 2), (X, [6, 31, 40], 3)];
    assert_eq!(broken(&history(&readers)), []);
    let beside_a_writer = [(S, [0, 1, 21], 1), (X, [5, 20, 30], 2)];
    assert_eq!(broken(&history(&beside_a_writer)), [Law::Exclusion]);
}

#[test]
fn more_permits_than_there_are_are_found() {
    let of = |size| ("permit", size);
    let three = |size| {
        [
            (of(size), [0, 1, 30], 3),
            (of(size), [0, 2, 30], 2),
            (of(size), [0, 20, 30], 1),
        ]
    };
    assert_eq!(broken(&history(&three(3))), []);
    assert_eq!(broken(&history(&three(2))), [Law::Exclusion]);
    let two = |from| [(of(3), [0, 1, 30], 1), (of(2), [0, from, 50], 2)];
    assert_eq!(broken(&history(&two(40))), [], "another size, later");
    assert_eq!(broken(&history(&two(20))), [Law::Exclusion], "two sizes at once");
}

#[test]
fn tokens_that_fall_or_repeat_are_found() {
    let tokens = |one, other| [(X, [0, 1, 10], one), (X, [0, 20, 30], other)];
    assert_eq!(broken(&history(&tokens(1, 2))), []);
    assert_eq!(broken(&history(&tokens(2, 1))), [Law::Tokens]);
    assert_eq!(broken(&history(&tokens(1, 1))), [Law::Tokens]);
    let readers = [(X, [0, 1, 10], 1), (S, [0, 20, 30], 3), (S, [0, 21, 30], 2)];
    assert_eq!(broken(&history(&readers)), [], "of readers beside each other");
}

#[test]
fn tokens_go_on_in_the_next_epoch() {
    let epoch = |token| history(&[(X, [0, 1, 10], token)]);
    assert_eq!(broken(&[epoch(1), epoch(2)].concat()), []);
    assert_eq!(broken(&[epoch(2), epoch(1)].concat()), [Law::Tokens]);
}

#[test]
fn a_fault_excuses_until_the_holder_is_told() {
    let two = history(&[(X, [0, 1, 100], 1), (X, [50, 60, 200], 2)]);
    let fault = |at: u64, told: &str, late: u64| {
        let at = at * MS;
        format!(
            "{two}{{\"at\":{at},\"is\":\"fault\",\"name\":\"f\",\"until\":{at},\"told\":\"{told}\",\"late\":{late}}}\n"
        )
    };
    assert_eq!(broken(&two), [Law::Exclusion]);
    assert_eq!(broken(&fault(55, "within", 50)), []);
    assert_eq!(
        broken(&fault(55, "within", 40)),
        [Law::Exclusion],
        "told too late"
    );
    assert_eq!(broken(&fault(55, "renewal", 0)), [], "a third of 300 ms");
    assert_eq!(broken(&fault(55, "lease", 0)), []);
    assert_eq!(broken(&fault(61, "lease", 0)), [Law::Exclusion], "it came after");
}

#[test]
fn counters_begin_anew_at_the_clock() {
    // 1 s after moment 0, the clock is at 1,001,000 µs.
    let after = |token| {
        let fault =
            "{\"at\":1000000000,\"is\":\"fault\",\"name\":\"f\",\"until\":1000000000,\"restarts\":true}\n";
        history(&[(X, [0, 1, 10], 2_000_000), (X, [1_500, 1_600, 1_700], token)]) + fault
    };
    assert_eq!(broken(&after(1_001_001)), []);
    assert_eq!(broken(&after(1_000_000)), [Law::Tokens]);
}

#[test]
fn what_is_no_history_is_an_error() {
    for text in [
        "x\n",
        "{\"at\":1,\"is\":\"held\",\"hold\":0}\n",
        &format!("{EPOCH}{{\"is\":\"sold\"}}\n"),
    ] {
        let error = text.parse::<History>().expect_err("no history").to_string();
        assert!(error.starts_with("line "), "{error}");
    }
}
