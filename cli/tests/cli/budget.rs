//! `--vram`: as many experts are resident as fit, to the byte, and what does not fit is refused with the sizes.

use serde_json::Value;

use super::{horizon, run_json};

/// `run` with a budget.
fn run(vram: &str, more: &[&str]) -> Value {
    run_json(&[&["Once", "--greedy", "-n", "12", "--vram", vram], more].concat())
}

fn number(v: &Value, key: &str) -> u64 {
    v[key].as_u64().unwrap_or_else(|| panic!("{key} in {v}"))
}

fn budget(v: &Value) -> &Value {
    &v["settings"]["budget"]
}

#[test]
fn the_most_experts_that_fit_are_resident() {
    let all = run("1GiB", &[]);
    let fit = budget(&all);
    assert_eq!((number(&all, "capacity"), number(fit, "capacity")), (16, 16));
    assert_eq!(
        (number(fit, "budget_bytes"), fit["all_experts"].as_bool()),
        (1 << 30, Some(true))
    );
    let ledger = fit["ledger"].as_array().expect("a list");
    let sum: u64 = ledger.iter().map(|line| line[1].as_u64().expect("bytes")).sum();
    assert_eq!(sum, number(fit, "total_bytes"));
    let names: Vec<&str> = ledger
        .iter()
        .map(|line| line[0].as_str().expect("a name"))
        .collect();
    for name in [
        "non-routed weights",
        "KV cache",
        "workspace",
        "expert slots",
        "spare slots",
        "staging buffers",
    ] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    // Exactly enough for ten experts a layer, and a byte less.
    let ten = number(fit, "total_bytes") - 6 * number(fit, "next_expert_bytes");
    for (bytes, capacity) in [(ten, 10), (ten - 1, 9)] {
        let v = run(&format!("{bytes}B"), &[]);
        assert_eq!(
            (number(&v, "capacity"), number(budget(&v), "capacity")),
            (capacity, capacity)
        );
        assert_eq!(
            (v["text"].as_str(), v["profile"].as_str()),
            (all["text"].as_str(), all["profile"].as_str())
        );
    }
    // A longer context and more spares leave less for experts.
    let tight = format!("{ten}B");
    assert!(number(&run(&tight, &["--ctx", "128"]), "capacity") > 10);
    assert_eq!(number(&run(&tight, &["--spares", "9"]), "capacity"), 9);
    // A capacity that fits is taken as it is.
    let given = run(&tight, &["-c", "7", "--policy", "lfu"]);
    assert_eq!(
        (number(&given, "capacity"), budget(&given)["chosen"].as_bool()),
        (7, Some(false))
    );
    // The table says all that, on stderr.
    let done = horizon(&["run", "Once", "-n", "1", "--vram", &tight]).ok();
    for part in [
        "chosen -c 10",
        "expert slots",
        "staging buffers",
        "in all",
        "left",
    ] {
        assert!(done.stderr.contains(part), "{part:?} is not in: {}", done.stderr);
    }
}

#[test]
fn a_budget_that_holds_too_little_is_refused_with_the_sizes() {
    for command in [&["run", "x"] as &[&str], &["bench", "decode"], &["chat"]] {
        let sizes = [
            "--vram 3.00 MiB",
            "too little by",
            "KV cache",
            "expert slots",
            "--ctx",
        ];
        horizon(&[command, &["--vram", "3MiB"]].concat()).fails(2, &sizes);
        horizon(&[command, &["--vram", "3MiB", "-c", "9"]].concat()).fails(2, &["-c 9 with --vram 3.00 MiB"]);
    }
    let all = run("1GiB", &[]);
    let ten = number(budget(&all), "total_bytes") - 6 * number(budget(&all), "next_expert_bytes");
    let tight = format!("{ten}B");
    horizon(&["run", "x", "--vram", &tight, "-c", "12"])
        .fails(2, &["-c 12", "--vram", "-c 10 is the most", "Needed:"]);
    horizon(&["run", "x", "--vram", &tight, "-c", "12", "--json"]).code_and_error(2, "contradict");
    // Other mistakes stay what they are.
    horizon(&["run", "x", "--vram", &tight, "-c", "17"]).fails(2, &["-c", "--ctx"]);
    horizon(&["run", "x", "--vram", &tight, "--spares", "3"]).fails(2, &["--spares 3"]);
    horizon(&["run", "x", "--vram", &tight, "--spares", "81"]).fails(2, &["--spares 81"]);
    for (size, why) in [
        ("6", "no unit"),
        ("6G", "6GiB"),
        ("zero", "6GiB"),
        ("0MiB", "nothing"),
        ("1e9GiB", "6GiB"),
    ] {
        horizon(&["run", "x", "--vram", size]).fails(2, &["--vram", size, why]);
    }
    horizon(&["run", "x", "--policy", "lru"]).fails(2, &["--capacity", "--vram"]);
}
