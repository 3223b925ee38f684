//! `--executor`, and `-c`: which experts are resident changes what is moved, never the text.

use serde_json::Value;

use super::{golden, horizon, horizon_with_input, ids, run_json};

/// A prompt that routes to every expert of a layer, so that prefill needs more experts than most capacities hold.
const LONG: &str = "Once upon a time there was a little girl named Lily. She had a red ball, a blue boat and a small \
                    dog called Max. One day they went to the park, and a big bird flew over the tall tree. \"Look, \
                    Max!\" said Lily. The dog ran and jumped, but the bird was too fast. Then";

const ZEROS: [&str; 5] = [
    "expert_d2h_bytes",
    "writebacks",
    "host_rewrites",
    "request_sha",
    "request_source_reads",
];

fn greedy(more: &[&str]) -> Value {
    run_json(&[&[LONG, "--greedy", "--ignore-eos", "-n", "40"], more].concat())
}

#[track_caller]
fn count(v: &Value, key: &str) -> u64 {
    v["observations"][key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key} is no number: {}", v["observations"]))
}

#[test]
fn executors_are_named_and_those_a_backend_lacks_are_refused() {
    for (line, name) in [
        (&[] as &[&str], "cpu-grouped"),
        (&["--executor", "cpu-grouped"], "cpu-grouped"),
        (&["--executor", "cpu-grouped-i16"], "cpu-grouped-i16"),
        (&["--backend", "cpu-reference"], "cpu-reference"),
        (
            &["--backend", "cpu-reference", "--executor", "cpu-reference"],
            "cpu-reference",
        ),
    ] {
        let v = run_json(&[&["Tom", "-n", "1"], line].concat());
        assert_eq!(v["settings"]["prefill_executor"], name);
        assert_eq!(v["settings"]["decode_executor"], name);
        assert_eq!(
            v["executors"],
            serde_json::json!({"prefill": name, "decode": name})
        );
    }
    let nowhere = |more: &[&str]| horizon(&[&["run", "Tom", "-m", "/no/such"], more].concat());
    nowhere(&["--executor", "cpu-reference"]).fails(2, &["cpu-reference", "cpu-grouped, cpu-grouped-i16"]);
    nowhere(&["--executor", "cpu-grouped", "--backend", "cpu-reference"])
        .fails(2, &["cpu-grouped", "there is cpu-reference"]);
    nowhere(&["--executor", "gpu"]).fails(2, &["cpu-grouped", "cpu-grouped-i16", "cpu-reference"]);
    for command in [
        &["run", "Tom"] as &[&str],
        &["bench", "decode"],
        &["eval", "logits", "--tokens", "1", "-o", "/no/such/file"],
    ] {
        for unfit in [["--experts", "f16"], ["--activations", "f32"]] {
            horizon(&[command, &["--executor", "cpu-grouped-i16"], &unfit].concat())
                .fails(1, &["cpu-grouped-i16", "--experts qpacked", "--activations f16"]);
        }
    }
}

#[test]
fn the_text_is_the_same_for_every_capacity_and_policy() {
    let all = greedy(&[]);
    assert_eq!((&all["capacity"], &all["policy"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (&all["profile"], &all["initial_placement"]),
        (&"fully-resident".into(), &"all experts".into())
    );
    let asked = count(&all, "hits");
    for unknown in ["expert_d2h_bytes", "misses", "h2d_bytes"] {
        assert_eq!(all["observations"][unknown], "UNKNOWN", "{unknown}");
    }
    for capacity in [4, 8, 12, 16] {
        for policy in ["lru", "lfu", "static", "lfu-aging"] {
            let c = capacity.to_string();
            let v = greedy(&["-c", &c, "--policy", policy]);
            assert_eq!(v["text"], all["text"], "-c {c} {policy}");
            assert_eq!(ids(&v, "token_ids"), ids(&all, "token_ids"), "-c {c} {policy}");
            for zero in ZEROS {
                assert_eq!(
                    v["observations"][zero].as_u64(),
                    Some(0),
                    "{zero} of -c {c} {policy}"
                );
            }
            let (hits, misses) = (count(&v, "hits"), count(&v, "misses"));
            assert_eq!(hits + misses, asked, "every request is a hit or a miss");
            assert_eq!(misses == 0, capacity == 16, "-c {c} {policy}: {misses} misses");
            assert_eq!(count(&v, "h2d_bytes").checked_rem(misses).unwrap_or(0), 0);
            assert_eq!(count(&v, "h2d_bytes") > 0, misses > 0);
            assert_eq!(v["observations"]["layers"].as_array().map(Vec::len), Some(5));
            assert_eq!(v["executors"], all["executors"]);
            assert_eq!(
                (
                    v["capacity"].as_u64(),
                    v["policy"].as_str(),
                    v["profile"].as_str()
                ),
                (Some(capacity), Some(policy), Some("resident-qpacked-cache-v1"))
            );
            assert!(
                v["initial_placement"]
                    .as_str()
                    .is_some_and(|p| p.starts_with("canonical"))
            );
        }
    }
}

#[test]
fn executors_and_the_unquantized_control_run_from_slots_too() {
    for line in [
        &["--executor", "cpu-grouped-i16"] as &[&str],
        &["--backend", "cpu-reference"],
        &["--experts", "f16", "--activations", "f32"],
        &["--threads", "1"],
    ] {
        let short = |more: &[&str]| run_json(&[&[LONG, "--greedy", "-n", "4"], line, more].concat());
        let (all, some) = (short(&[]), short(&["-c", "5", "--spares", "7"]));
        assert_eq!(ids(&some, "token_ids"), ids(&all, "token_ids"), "{line:?}");
        assert!(count(&some, "misses") > 0, "{line:?}");
        assert_eq!(some["settings"]["residency"]["spares"], 7);
    }
}

#[test]
fn the_unquantized_control_with_a_cache_gives_the_text_of_transformers() {
    let golden = golden();
    let prompt = &golden["prompts"][0];
    let line = [
        prompt["text"].as_str().expect("a text"),
        "--greedy",
        "--ignore-eos",
        "-n",
        "64",
        "--experts",
        "f16",
        "--activations",
        "f32",
    ];
    let v = run_json(&[&line as &[&str], &["-c", "4"]].concat());
    assert_eq!(v["token_ids"], prompt["greedy_ids"]);
    assert!(count(&v, "misses") > 0);
}

#[test]
fn caches_that_cannot_be_are_usage_errors() {
    for command in [&["run", "Tom"] as &[&str], &["bench", "decode"], &["chat"]] {
        let with = |more: &[&str]| horizon_with_input(&[command, more].concat(), "hello\n");
        for c in ["0", "3", "17", "4096"] {
            with(&["-c", c]).fails(2, &["experts in each layer", "4", "16", "--ctx"]);
        }
        with(&["-c", "8", "--spares", "3"]).fails(2, &["--spares 3", "4 experts"]);
        with(&["-c", "8", "--spares", "81"]).fails(2, &["--spares 81", "80"]);
        with(&["-c", "8", "--policy", "mru"]).fails(2, &["mru", "lru, lfu, static, lfu-aging"]);
        with(&["--policy", "lru"]).fails(2, &["--capacity"]);
        with(&["--spares", "4"]).fails(2, &["--capacity"]);
    }
}

#[test]
fn hit_rate_and_bytes_moved_are_a_line_on_stderr() {
    let done = horizon(&["run", LONG, "-n", "4", "--greedy", "-c", "6"]).ok();
    let line = done.stderr.lines().find(|l| l.contains("hit rate"));
    let line = line.unwrap_or_else(|| panic!("{}", done.stderr));
    assert!(
        line.contains("6 experts a layer") && line.contains("lru") && line.contains("moved"),
        "{line}"
    );
    let done = horizon_with_input(&["chat", "-c", "6", "-n", "4"], "hello\nagain\n").ok();
    assert_eq!(done.stderr.matches("hit rate").count(), 2, "{}", done.stderr);
}

#[test]
fn a_benchmark_counts_slots_and_staging_as_memory() {
    let bench = |more: &[&str]| {
        horizon(&[&["bench", "decode", "--tokens", "8", "--json"], more].concat())
            .ok()
            .json()
    };
    let (all, v) = (bench(&[]), bench(&["-c", "8"]));
    assert_eq!(
        (v["capacity"].as_u64(), all["profile"].as_str()),
        (Some(8), Some("fully-resident"))
    );
    assert!(count(&v, "hits") + count(&v, "misses") > 0);
    let item = |name: &str| {
        let plan = v["predicted"]["plan"].as_array().expect("a list");
        let found = plan.iter().find(|i| i[0] == name);
        found
            .and_then(|i| i[1].as_u64())
            .unwrap_or_else(|| panic!("{name} in {plan:?}"))
    };
    // 5 layers of 8 slots, 4 spares, and 4 staging buffers, of equal records.
    assert_eq!(item("expert slots"), 10 * item("staging buffers"));
    assert_eq!(item("spare slots"), item("staging buffers"));
    let total = |v: &Value| v["predicted"]["total"].as_u64().expect("a number");
    assert_eq!(
        total(&v),
        total(&all) + item("expert slots") + item("spare slots") + item("staging buffers")
    );
    assert_eq!(
        item("staging buffers") / 4 * 80,
        v["predicted"]["weights"]["experts"]
    );
}
