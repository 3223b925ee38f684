//! `horizon pack` and `run --trace` ended from outside: killed, stopped by Ctrl-C, or refused the space that they need.

#![cfg(unix)]

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::{Done, as_str, command, demo_checkpoint, horizon};

/// Starts packing and returns once shards are being written; the work that is left takes far longer than a signal.
fn packing(src: &Path, dest: &Path) -> Child {
    let child = command(&["pack", as_str(src), "-o", as_str(dest), "--threads", "1"])
        .spawn()
        .expect("the program starts");
    let shard = dest
        .with_extension("hz.partial")
        .join("model-00001-of-00006.safetensors");
    let start = Instant::now();
    while !shard.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "no shard appears");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status()
        .expect("kill is there");
    assert!(status.success());
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn after_a_kill_the_next_run_removes_the_leftover_and_packs() {
    let folder = tempfile::tempdir().expect("a folder");
    let src = demo_checkpoint(folder.path());
    let dest = folder.path().join("m.hz");
    let mut child = packing(&src, &dest);
    // While it works, another run leaves it alone.
    horizon(&["pack", as_str(&src), "-o", as_str(&dest)]).fails(1, &["m.hz", "another run"]);
    signal(&child, "-KILL");
    child.wait().expect("ends");
    assert_eq!(entries(folder.path()), ["m.hz.partial", "stories"]);
    let done = horizon(&["pack", as_str(&src), "-o", as_str(&dest)]).ok();
    assert!(done.stderr.contains("m.hz.partial"), "{}", done.stderr);
    assert_eq!(entries(folder.path()), ["m.hz", "stories"]);
    horizon(&["inspect", as_str(&dest), "--verify"]).ok();
}

#[test]
fn ctrl_c_leaves_no_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let src = demo_checkpoint(folder.path());
    let child = packing(&src, &folder.path().join("m.hz"));
    signal(&child, "-INT");
    let done = Done::of(child.wait_with_output().expect("ends"));
    assert_eq!(done.code, 130, "{}", done.stderr);
    assert_eq!(entries(folder.path()), ["stories"]);
}

#[test]
fn a_write_that_is_refused_leaves_no_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let src = demo_checkpoint(folder.path());
    let dest = folder.path().join("m.hz");
    // Files of at most 64 KiB, and the signal of the limit ignored: writing fails as on a disk that is full.
    let script = "trap '' XFSZ; ulimit -f 128; exec \"$0\" pack \"$1\" -o \"$2\"";
    let output = Command::new("sh")
        .args([
            "-c",
            script,
            env!("CARGO_BIN_EXE_horizon"),
            as_str(&src),
            as_str(&dest),
        ])
        .output()
        .expect("sh is there");
    Done::of(output).fails(1, &["m.hz.partial", "File too large"]);
    assert_eq!(entries(folder.path()), ["stories"]);
}

/// Starts a run that records its routing to `trace` and returns once text comes.
fn recording(trace: &Path) -> Child {
    let flags = [
        "run",
        "Once",
        "--ignore-eos",
        "--greedy",
        "-n",
        "100000",
        "--backend",
        "cpu-reference",
    ];
    let mut child = command(&[&flags as &[&str], &["--trace", as_str(trace)]].concat())
        .spawn()
        .expect("the program starts");
    let mut first = [0];
    let stdout = child.stdout.as_mut().expect("is piped");
    stdout.read_exact(&mut first).expect("text comes");
    child
}

/// The beginning of a trace, which is all that a run looks at before it replaces one.
fn earlier_trace() -> Vec<u8> {
    let header = br#"{"__metadata__":{"horizon_trace":"earlier"}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header].concat()
}

#[test]
fn a_run_that_is_killed_leaves_the_trace_before_it_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("t");
    std::fs::write(&trace, earlier_trace()).expect("writes");
    let mut child = recording(&trace);
    signal(&child, "-KILL");
    child.wait().expect("ends");
    assert_eq!(entries(folder.path()), ["t"]);
    assert_eq!(std::fs::read(&trace).expect("reads"), earlier_trace());
}

#[test]
fn a_run_that_is_stopped_keeps_the_trace_of_what_it_ran() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("t");
    let child = recording(&trace);
    signal(&child, "-INT");
    let done = Done::of(child.wait_with_output().expect("ends"));
    assert_eq!(done.code, 130, "{}", done.stderr);
    assert_eq!(entries(folder.path()), ["t"]);
    horizon(&["cache", "simulate", as_str(&trace)]).ok();
}

#[test]
fn a_trace_never_replaces_what_is_no_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompt = folder.path().join("prompt.txt");
    std::fs::write(&prompt, "Once upon a time").expect("writes");
    let file = as_str(&prompt);
    horizon(&["run", "-f", file, "-n", "3", "--trace", file])
        .fails(1, &[file, "not a routing trace", "another name"]);
    assert_eq!(std::fs::read(&prompt).expect("reads"), b"Once upon a time");
}

#[test]
fn a_trace_that_is_refused_its_space_is_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("t");
    std::fs::write(&trace, earlier_trace()).expect("writes");
    // Files of at most 512 bytes or a KiB, and the signal of the limit ignored.
    let script =
        "trap '' XFSZ; ulimit -f 1; exec \"$0\" run Once --greedy --ignore-eos -n 60 --json --trace \"$1\"";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_horizon"), as_str(&trace)])
        .output()
        .expect("sh is there");
    Done::of(output).code_and_error(1, as_str(&trace));
    assert_eq!(entries(folder.path()), ["t"]);
    assert_eq!(std::fs::read(&trace).expect("reads"), earlier_trace());
}
