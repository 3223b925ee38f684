//! `--trace` and `cache simulate`: what a run chose, and what other policies would have made of it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{as_str, horizon, run_json};

const PROMPT: &str =
    "Once upon a time there was a little girl named Lily. She had a red ball and a small dog";

/// Records a run at a capacity and gives its report.
fn record(path: &Path, more: &[&str]) -> Value {
    let flags = [
        PROMPT,
        "--greedy",
        "--ignore-eos",
        "-n",
        "40",
        "--trace",
        as_str(path),
    ];
    run_json(&[&flags, more].concat())
}

fn simulate(more: &[&str]) -> Value {
    horizon(&[&["cache", "simulate", "--json"], more].concat())
        .ok()
        .json()
}

fn counts(v: &Value) -> [u64; 2] {
    ["hits", "misses"].map(|key| v[key].as_u64().unwrap_or_else(|| panic!("{key} in {v}")))
}

#[test]
fn a_replayed_run_hits_and_misses_what_the_cache_did() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("t.safetensors");
    let plain = run_json(&[PROMPT, "--greedy", "--ignore-eos", "-n", "40"]);
    let mut before = None;
    for (capacity, policy, spares) in [("4", "lru", "4"), ("7", "lfu-aging", "4"), ("12", "static", "9")] {
        let flags = ["-c", capacity, "--spares", spares];
        let run = record(&path, &[&flags as &[&str], &["--policy", policy]].concat());
        assert_eq!(run["text"], plain["text"], "recording changes nothing");
        let prompt = run["prompt_ids"].as_array().expect("ids").len() as u64;
        let trace = &run["trace"];
        assert_eq!(
            (trace["tokens"].as_u64(), trace["steps"].as_u64()),
            (Some(prompt + 39), Some(40))
        );
        // The routing is the model's: it does not depend on what is resident.
        let bytes = fs::read(&path).expect("written");
        assert_eq!(
            *before.get_or_insert_with(|| bytes.clone()),
            bytes,
            "-c {capacity}"
        );
        let v = simulate(&[&flags as &[&str], &["--policy", policy, "--trace", as_str(&path)]].concat());
        let results = v["results"].as_array().expect("a list");
        let names: Vec<&str> = results
            .iter()
            .map(|r| r["policy"].as_str().expect("a name"))
            .collect();
        assert_eq!(names, [policy, "optimum"]);
        assert_eq!(
            counts(&results[0]),
            counts(&run["observations"]),
            "-c {capacity} {policy}"
        );
        assert_eq!(results[0]["bytes"], run["observations"]["h2d_bytes"]);
        let (misses, least) = (counts(&results[0])[1], counts(&results[1])[1]);
        assert!(least <= misses && least > 0);
        let over = results[0]["over_optimum"].as_f64().expect("a share");
        assert!((over - (misses as f64 / least as f64 - 1.0)).abs() < 1e-12);
    }
    // Everything is compared unless something is asked for, in a table too.
    let v = simulate(&[as_str(&path), as_str(&path)]);
    let results = v["results"].as_array().expect("a list");
    assert!(
        results.len() > 20 && results.len().is_multiple_of(5),
        "{}",
        results.len()
    );
    assert_eq!(v["steps"], 80, "two traces are replayed as one");
    let text = horizon(&[
        "cache",
        "simulate",
        as_str(&path),
        "-c",
        "4,16",
        "--policy",
        "lfu,lru,lfu",
    ])
    .ok();
    for part in ["stories-olmoe", "hit rate", "over optimum", "optimum", "100.0 %"] {
        assert!(text.stdout.contains(part), "{part:?} is not in: {}", text.stdout);
    }
    assert_eq!(text.stdout.lines().count(), 3 + 2 * 3, "{}", text.stdout);
}

#[test]
fn a_benchmark_is_recorded_too() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("t.safetensors");
    let sizes = ["--tokens", "9", "--prompt-tokens", "20", "--routing-load", "30"];
    let flags = ["-c", "6", "--json", "--trace", as_str(&path)];
    let run = horizon(&[&["bench", "decode"], &sizes as &[&str], &flags].concat())
        .ok()
        .json();
    assert_eq!(
        run["trace"]["tokens"],
        20 + 8,
        "the routing load is no part of it"
    );
    let v = simulate(&["-c", "6", "--policy", "lru", as_str(&path)]);
    assert_eq!(counts(&v["results"][0]), counts(&run["observations"]));
}

#[test]
fn traces_that_cannot_be_written_or_read_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    let nowhere = at("no/t");
    // Before the model runs: nothing is printed.
    horizon(&["run", "x", "--trace", as_str(&nowhere)]).fails(1, &["no/t"]);
    horizon(&["run", "x", "--trace", as_str(dir.path())]).fails(1, &["not a regular file"]);
    horizon(&["bench", "decode", "--trace", as_str(dir.path())]).fails(1, &["not a regular file"]);
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);

    fs::write(at("junk"), "no trace at all").expect("writes");
    horizon(&["cache", "simulate", as_str(&at("junk"))]).fails(1, &["junk", "not a routing trace"]);
    horizon(&["cache", "simulate", as_str(&at("none"))]).fails(1, &["none"]);
    horizon(&["cache", "simulate", "--json", as_str(&at("none"))]).code_and_error(1, "none");
    horizon(&["cache", "simulate"]).fails(2, &["TRACE"]);
    let path = at("t");
    record(&path, &[]);
    for (flags, parts) in [
        (["-c", "3"], ["-c", "4"]),
        (["-c", "4,17"], ["capacity 17", "16"]),
        (["--spares", "3"], ["--spares 3", "4"]),
        (["--spares", "81"], ["--spares 81", "80"]),
        (["--policy", "random"], ["--policy", "lfu-aging"]),
    ] {
        horizon(&[&["cache", "simulate", as_str(&path)], &flags as &[&str]].concat()).fails(2, &parts);
    }
}
