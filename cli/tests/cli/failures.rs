//! What is wrong is said, with what to do about it, and the exit code tells whose mistake it was.

use std::fs;
use std::path::Path;

use super::{as_str, command, demo_checkpoint, horizon, horizon_with_input};

#[test]
fn models_that_are_not_there_or_not_models() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("writes");
        path
    };
    let (gguf, text) = (file("model.gguf", b"GGUF\x03\0\0\0"), file("notes.txt", b"hello"));
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    let missing = folder.path().join("missing");
    for command in [
        &["run", "hello"] as &[&str],
        &["inspect"],
        &["eval", "logits", "--tokens", "1", "-o", "x"],
    ] {
        let with = |model| horizon(&[command, &["-m", model]].concat());
        with(as_str(&missing)).fails(1, &["missing", "no such file or directory"]);
        with(as_str(&gguf)).fails(1, &["model.gguf", "GGUF", "safetensors"]);
        with(as_str(&text)).fails(1, &["notes.txt", "directory"]);
        with(as_str(&empty)).fails(1, &["empty"]);
    }
}

#[test]
fn checkpoints_with_a_damaged_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let run = || horizon(&["run", "hello", "-n", "1", "-m", as_str(&dir)]);
    run().ok();
    let damaged = |name: &str, bytes: &[u8], parts: &[&str]| {
        let path = dir.join(name);
        let before = fs::read(&path).expect("is there");
        fs::write(&path, bytes).expect("writes");
        run().fails(1, parts);
        fs::write(&path, before).expect("writes");
    };
    damaged("tokenizer.json", b"", &["tokenizer.json", "empty"]);
    damaged("config.json", b"{", &["config.json"]);
    damaged("model.safetensors", &[0xff; 64], &["model.safetensors"]);
    damaged(
        "generation_config.json",
        b"{\"top_p\": 7}",
        &["generation_config.json", "top_p"],
    );
    let config = fs::read_to_string(dir.join("config.json")).expect("is text");
    let with = |from: &str, to: &str| config.replace(from, to).into_bytes();
    damaged(
        "config.json",
        &with("\"num_experts\": 16", "\"num_experts\": 0"),
        &["num_experts"],
    );
    damaged(
        "config.json",
        &with("\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 17"),
        &["num_experts_per_tok"],
    );
    damaged(
        "config.json",
        &with("\"olmoe\"", "\"llama\""),
        &["llama", "olmoe", "qwen2_moe", "qwen3_moe", "mixtral"],
    );
    damaged(
        "config.json",
        &with("\"hidden_size\": 256", "\"hidden_size\": 512"),
        &["model.safetensors", "shape"],
    );
    let tokenizer = fs::read_to_string(dir.join("tokenizer.json")).expect("is text");
    let added = tokenizer
        .replacen("\"added_tokens\": [", ADDED, 1)
        .replacen("\"added_tokens\":[", ADDED, 1);
    damaged(
        "tokenizer.json",
        added.as_bytes(),
        &["tokenizer.json", "ids up to 4096", "only 4096", "vocab_size"],
    );
    fs::remove_file(dir.join("tokenizer.json")).expect("is there");
    run().fails(1, &["there is no tokenizer.json"]);
    fs::remove_file(dir.join("model.safetensors")).expect("is there");
    run().fails(1, &["safetensors"]);
}

/// The name of the first weight file of an artifact.
fn shard(artifact: &Path) -> String {
    let names = fs::read_dir(artifact)
        .expect("a folder")
        .map(|e| e.expect("an entry").file_name());
    let names = names.map(|n| n.into_string().expect("UTF-8"));
    names
        .filter(|n| n.ends_with(".safetensors"))
        .min()
        .expect("weights")
}

/// One token more than the demo model knows.
const ADDED: &str =
    "\"added_tokens\": [{\"id\": 4096, \"content\": \"<more>\", \"single_word\": false, \"lstrip\": false,
    \"rstrip\": false, \"normalized\": false, \"special\": true}, ";

/// What is wrong with the prompt or its template is found without the weights: here their bytes are damaged, which only
/// a load would find.
#[test]
fn prompts_are_checked_before_the_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let artifact = folder.path().join("a.hz");
    horizon(&["pack", as_str(&dir), "-o", as_str(&artifact)]).ok();
    let name = shard(&artifact);
    let shard = artifact.join(&name);
    let mut bytes = fs::read(&shard).expect("one shard");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&shard, bytes).expect("writes");
    let model = ["-m", as_str(&artifact)];
    let run = |args: &[&str]| horizon(&[&["run"], args, &model as &[&str]].concat());
    run(&["hello"]).fails(1, &[&name, "damaged"]);
    let long = "a story ".repeat(20);
    run(&[&long, "--ctx", "16"]).fails(1, &["tokens and the context holds 16"]);
    let template = "{{ raise_exception('no system message') }}";
    fs::write(dir.join("chat_template.jinja"), template).expect("writes");
    let other = folder.path().join("b.hz");
    horizon(&["pack", as_str(&dir), "-o", as_str(&other)]).ok();
    fs::copy(&shard, other.join(&name)).expect("copies");
    let done = horizon(&["run", "hello", "--chat", "-m", as_str(&other)]);
    done.fails(1, &["no system message"]);
}

#[test]
fn a_file_that_is_missing_from_an_artifact_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let artifact = folder.path().join("a.hz");
    horizon(&["pack", as_str(&dir), "-o", as_str(&artifact)]).ok();
    for name in [&shard(&artifact), "tokenizer.json", "config.json"] {
        let (here, away) = (artifact.join(name), folder.path().join("away"));
        fs::rename(&here, &away).expect("is there");
        for line in [
            &["run", "hello", "-m"] as &[&str],
            &["inspect"],
            &["inspect", "--verify"],
        ] {
            let done = horizon(&[line, &[as_str(&artifact)]].concat());
            done.fails(
                1,
                &[name, "missing", "copy the artifact again", "horizon pack --force"],
            );
        }
        fs::rename(&away, &here).expect("can be put back");
    }
    horizon(&["run", "hello", "-n", "1", "-m", as_str(&artifact)]).ok();
}

/// Neither what rounding to FP16 lost nor anything else is news to somebody who tries the program; the record has it.
#[test]
fn the_first_command_says_nothing_but_speed_and_memory() {
    let done = horizon(&["run", "Once upon a time", "-n", "4"]).ok();
    assert_eq!(done.stderr.lines().count(), 1, "{}", done.stderr);
    let record = super::run_json(&["Once upon a time", "-n", "4"]);
    assert!(
        record["notes"][0]
            .as_str()
            .is_some_and(|n| n.contains("lost bits")),
        "{record}"
    );
}

#[test]
fn prompts_that_do_not_fit_or_are_not_there() {
    let long = "a story ".repeat(20);
    horizon(&["run", &long, "--ctx", "16"]).fails(1, &["tokens and the context holds 16", "1024"]);
    horizon(&["run", "hello", "--ctx", "1025"]).fails(1, &["--ctx 1025", "1024"]);
    horizon(&["run"]).fails(2, &["the prompt is empty"]);
    horizon(&["run", ""]).fails(2, &["the prompt is empty"]);
    horizon(&["run", "-f", "/no/such/prompt"]).fails(1, &["--file /no/such/prompt"]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("p");
    fs::write(&path, b"ab\xff").expect("writes");
    horizon(&["run", "-f", as_str(&path)]).fails(1, &["UTF-8", "byte 2"]);
}

#[test]
fn a_named_card_that_is_not_there_is_an_error_and_an_unnamed_one_is_not_missed() {
    let line = ["run", "Once", "-n", "2", "--greedy"];
    let with = |more: &[&'static str]| horizon(&[&line[..], more].concat());
    for named in [&["--backend", "cuda"] as &[_], &["--executor", "persistent-v1"]] {
        with(named).fails(1, &["--backend cuda: no CUDA device"]);
    }
    with(&["--backend", "cuda", "--activations", "f32"]).fails(1, &["--activations f32"]);
    let done = with(&["--json"]).ok();
    let settings = &done.json()["settings"];
    assert_eq!(settings["backend"], "cpu");
    assert!(
        settings["backend_reason"]
            .as_str()
            .is_some_and(|r| r.starts_with("no CUDA device"))
    );
    assert!(settings["device_memory"].is_null());
    assert!(
        !done.stderr.contains("GPU") && !done.stderr.contains("note"),
        "{}",
        done.stderr
    );
    assert_eq!(
        with(&["--json", "--backend", "cpu"]).ok().json()["settings"]["backend_reason"],
        "named"
    );
}

#[test]
fn mistakes_in_the_command_line_end_with_2_before_any_model_is_opened() {
    let at = |more: &[&'static str]| [&["run", "hello", "-m", "/no/such"], more].concat();
    for (line, part) in [
        (at(&["--backend", "tpu"]), "cpu-reference"),
        (at(&["--backend", "cuda", "-c", "4"]), "-c: partial residency"),
        (
            at(&["--backend", "cuda", "--vram", "1GiB"]),
            "--vram: partial residency",
        ),
        (at(&["--executor", "persistent-v1", "-c", "4"]), "--backend cpu"),
        (at(&["--backend", "wgpu"]), "has no wgpu backend"),
        (at(&["--experts", "int8"]), "qpacked"),
        (at(&["--block", "100"]), "32, 64, 128 or 256"),
        (at(&["--experts", "f16", "--block", "32"]), "--block"),
        (at(&["--top-p", "2"]), "--top-p"),
        (at(&["--temperature", "-1"]), "--temperature"),
        (at(&["--stop", ""]), "--stop"),
        (at(&["--threads", "0"]), "--threads"),
        (at(&["--frobnicate"]), "--frobnicate"),
        (at(&["--system", "s"]), "--system"),
        (at(&["--policy", "lru"]), "--policy"),
        (at(&["--spares", "4"]), "--spares"),
        (at(&["--dense", "q4"]), "--dense"),
        (at(&["-n", "-5"]), "--max-tokens"),
        (at(&["-c", "-1"]), "--capacity"),
        (
            vec!["eval", "logits", "-m", "/no/such", "--tokens", "1,x", "-o", "out"],
            "\"x\"",
        ),
        (
            vec!["eval", "logits", "-m", "/no/such", "--tokens", "", "-o", "out"],
            "--tokens",
        ),
        (
            vec!["eval", "perplexity", "/no/such", "--window", "1"],
            "--window",
        ),
        (
            vec!["bench", "make-checkpoint", "--shape", "gpt", "-o", "out"],
            "olmoe",
        ),
        (vec!["inspect", "--verify"], "--verify"),
        (vec!["frobnicate"], "frobnicate"),
    ] {
        let done = horizon(&line);
        assert_eq!(done.code, 2, "{line:?}: {}", done.stderr);
        done.fails(2, &[part]);
    }
}

#[test]
fn with_json_a_failure_is_an_object_too() {
    let done = horizon(&["run", "hello", "--json", "-m", "/no/such"]);
    assert_eq!(done.code, 1);
    let error = &done.json()["error"];
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains("/no/such") && error["causes"].is_array());
    assert_eq!(done.stderr, format!("error: {message}\n"));
}

#[test]
fn a_hub_that_cannot_be_reached_is_named_and_a_directory_suggested() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = command(&["run", "hello", "-m", "org/name"])
        .env("HF_HOME", folder.path())
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output()
        .expect("the program starts");
    super::Done::of(output).fails(1, &["org/name", "127.0.0.1:9", "directory"]);
}

#[test]
fn chat_needs_a_template() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    fs::write(dir.join("tokenizer_config.json"), "{}").expect("writes");
    let model = ["-m", as_str(&dir)];
    horizon(&[&["run", "hello", "--chat"], &model as &[&str]].concat()).fails(1, &["no chat template"]);
    horizon_with_input(&[&["chat"], &model as &[&str]].concat(), "hello\n").fails(1, &["no chat template"]);
    horizon(&[&["run", "hello", "-n", "1"], &model as &[&str]].concat()).ok();
}
