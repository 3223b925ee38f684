//! The command as its users meet it: exit codes, stdout, stderr, JSON, signals. All on the embedded demo model.

mod answers;
mod budget;
mod chat;
mod failures;
mod hub;
mod interrupted;
mod measures;
#[path = "../../../models/tests/mock_hub/mod.rs"]
#[expect(
    dead_code,
    reason = "made for the tests of the hub itself, which use all of it"
)]
mod mock_hub;
mod models;
mod residency;
mod traces;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// What a finished command gave.
struct Done {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Done {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
        Self {
            code: output.status.code().expect("no signal ended it"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!(self.code, 0, "stderr: {}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// The failure, which must have this exit code, print nothing to stdout, and say each of `parts` on stderr.
    #[track_caller]
    fn fails(self, code: i32, parts: &[&str]) {
        assert_eq!(
            (self.code, self.stdout.as_str()),
            (code, ""),
            "stderr: {}",
            self.stderr
        );
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert!(self.stderr.contains("error"), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in: {}", self.stderr);
        }
    }

    /// The failure of a command with `--json`: its object on stdout names `part`.
    #[track_caller]
    fn code_and_error(self, code: i32, part: &str) {
        assert_eq!(self.code, code, "stderr: {}", self.stderr);
        let message = self.json()["error"]["message"].to_string();
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }

    /// Stdout as the one line of JSON that it must be.
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.stdout.matches('\n').count(), 1, "{}", self.stdout);
        serde_json::from_str(&self.stdout).expect("stdout is JSON")
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_horizon"));
    command
        .args(args)
        // A card of this machine stays unseen: what is expected here is the CPU's.
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn horizon(args: &[&str]) -> Done {
    Done::of(command(args).output().expect("the program starts"))
}

fn horizon_with_input(args: &[&str], input: &str) -> Done {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // The program may end before it has read everything; its exit code tells the rest.
    let _ = child.stdin.take().expect("is piped").write_all(input.as_bytes());
    Done::of(child.wait_with_output().expect("the program ends"))
}

/// `run` with `--json` and `more`, which must succeed.
#[track_caller]
fn run_json(more: &[&str]) -> Value {
    horizon(&[&["run", "--json"], more].concat()).ok().json()
}

/// The ids in `value[key]`.
#[track_caller]
fn ids(value: &Value, key: &str) -> Vec<u64> {
    value[key]
        .as_array()
        .expect(key)
        .iter()
        .map(|v| v.as_u64().expect("an id"))
        .collect()
}

/// The demo model as a checkpoint directory.
fn demo_checkpoint(folder: &Path) -> PathBuf {
    let dir = folder.join("stories");
    fs::create_dir(&dir).expect("a new folder");
    let demo = horizon_models::demo::embedded().expect("the asset is sound");
    for (name, bytes) in demo.files {
        fs::write(dir.join(name), bytes).expect("writes");
    }
    fs::write(dir.join("model.safetensors"), demo.safetensors).expect("writes");
    dir
}

fn as_str(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// The project's golden outputs of the demo model.
fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/assets/stories-olmoe/golden.json");
    serde_json::from_slice(&fs::read(path).expect("the asset is there")).expect("is JSON")
}
