//! `horizon run`.

use std::io::Read;

use serde_json::Value;

use super::{golden, horizon, horizon_with_input, ids, run_json};

const STORY: &str = "Once upon a time";

#[test]
fn a_story_goes_to_stdout_and_the_figures_to_stderr() {
    let done = horizon(&["run", STORY, "-n", "30", "--seed", "1"]).ok();
    assert!(
        done.stdout.ends_with('\n') && done.stdout.split_whitespace().count() > 10,
        "{}",
        done.stdout
    );
    for figure in ["first token", "tok/s", "30 tokens", "peak RSS", "seed 1"] {
        assert!(
            done.stderr.contains(figure),
            "{figure} is not in: {}",
            done.stderr
        );
    }
    assert_eq!(horizon(&["run", STORY, "-n", "5", "--quiet"]).ok().stderr, "");
}

#[test]
fn a_seed_is_a_text() {
    let text = |seed: &str, threads: &str| {
        let line = [
            "run",
            STORY,
            "-n",
            "40",
            "-q",
            "--seed",
            seed,
            "--threads",
            threads,
        ];
        horizon(&line).ok().stdout
    };
    let one = text("1", "1");
    assert_eq!(text("1", "1"), one);
    assert_eq!(text("1", "3"), one, "threads do not change the text");
    assert_ne!(text("2", "1"), one);
    // Without a seed there is a new one each time, and it is reported.
    let first = run_json(&[STORY, "-n", "40"]);
    let seed = first["settings"]["sampling"]["seed"].to_string();
    assert_eq!(
        run_json(&[STORY, "-n", "40", "--seed", &seed])["text"],
        first["text"]
    );
    assert_ne!(
        run_json(&[STORY, "-n", "40"])["settings"]["sampling"]["seed"].to_string(),
        seed
    );
}

#[test]
fn json_says_what_was_decided_and_what_came_out() {
    let v = run_json(&[
        STORY, "-n", "12", "--seed", "5", "--top-k", "40", "--stop", "zebra",
    ]);
    assert_eq!(ids(&v, "prompt_ids"), [413, 421, 263, 386]);
    assert_eq!(ids(&v, "token_ids").len(), 12);
    assert!(!v["text"].as_str().expect("a text").is_empty());
    assert_eq!(v["stop_reason"], "max_tokens");
    for key in [
        "load_s",
        "first_token_s",
        "decode_s",
        "total_s",
        "decode_tokens_per_second",
    ] {
        assert!(
            v["timings"][key].as_f64().is_some_and(|t| t > 0.0),
            "{key}: {}",
            v["timings"]
        );
    }
    assert_eq!(
        (&v["timings"]["prompt_tokens"], &v["timings"]["generated_tokens"]),
        (&4.into(), &12.into())
    );
    let q8 = run_json(&["Once upon a time", "-n", "2", "--dense", "q8"]);
    assert_eq!(q8["settings"]["dense"], "q8");
    let s = &v["settings"];
    assert_eq!(
        (&s["backend"], &s["activations"], &s["dense"]),
        (&"cpu".into(), &"f16".into(), &"f16".into())
    );
    assert_eq!(
        (&s["context"], &s["max_tokens"], &s["stop"][0]),
        (&1024.into(), &12.into(), &"zebra".into())
    );
    assert!(s["decode_executor"].is_string() && s["prefill_executor"].is_string());
    assert_eq!(s["experts"]["encoding"], "qpacked");
    assert_eq!(s["model"]["family"], "olmoe");
    assert_eq!(s["model"]["sha256"].as_str().map(str::len), Some(64));
    // generation_config.json of the model, and the command line over it.
    let sampling = &s["sampling"];
    assert_eq!(
        (sampling["top_k"].as_u64(), sampling["seed"].as_u64()),
        (Some(40), Some(5))
    );
    assert!((sampling["temperature"].as_f64().expect("a number") - 0.7).abs() < 1e-6);
    assert_eq!(s["eos_token_ids"], serde_json::json!([0]));
    #[cfg(target_os = "linux")]
    assert!(v["memory"]["peak_bytes"].as_u64() > v["memory"]["anonymous_bytes"].as_u64());
}

#[test]
fn greedy_text_of_unquantized_experts_is_that_of_transformers() {
    let golden = golden();
    for prompt in golden["prompts"].as_array().expect("prompts") {
        let text = prompt["text"].as_str().expect("a text");
        let line = [
            text,
            "--greedy",
            "--ignore-eos",
            "-n",
            "64",
            "--experts",
            "f16",
            "--activations",
            "f32",
        ];
        let v = run_json(&line);
        assert_eq!(v["prompt_ids"], prompt["ids"], "{text}");
        assert_eq!(v["token_ids"], prompt["greedy_ids"], "{text}");
        assert_eq!(v["text"], prompt["greedy_text"], "{text}");
    }
}

#[test]
fn both_backends_say_the_same() {
    let text = |backend| run_json(&[STORY, "-n", "24", "--seed", "9", "--backend", backend]);
    let (fast, reference) = (text("cpu"), text("cpu-reference"));
    assert_eq!(fast["token_ids"], reference["token_ids"]);
    assert_eq!(reference["settings"]["backend"], "cpu-reference");
}

#[test]
fn the_prompt_can_be_an_argument_a_file_or_stdin_and_stays_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("prompt.txt");
    let text = "<|user|>\nTell me a story.\n<|assistant|>\n";
    std::fs::write(&path, text).expect("writes");
    let want = run_json(&[text, "-n", "3", "--greedy"]);
    let of = |v: Value| (ids(&v, "prompt_ids"), ids(&v, "token_ids"));
    let want = of(want);
    assert_eq!(
        of(run_json(&[
            "-f",
            super::as_str(&path),
            "-n",
            "3",
            "--greedy",
            "--raw"
        ])),
        want
    );
    for line in [
        &["run", "--json", "-n", "3", "--greedy"] as &[&str],
        &["run", "--json", "-n", "3", "--greedy", "-f", "-"],
    ] {
        let done = horizon_with_input(line, text).ok();
        assert_eq!(of(done.json()), want);
        assert!(done.stderr.contains("ends with a line break"), "{}", done.stderr);
    }
    // Special tokens in the text are single tokens.
    assert!(want.0.len() < 12, "{:?}", want.0);
}

#[test]
fn a_chat_prompt_goes_through_the_template() {
    let chat = run_json(&["Tell me a story.", "--chat", "-n", "3", "--greedy"]);
    let raw = run_json(&[
        "<|user|>\nTell me a story.\n<|assistant|>\n",
        "-n",
        "3",
        "--greedy",
    ]);
    assert_eq!(
        (&chat["prompt_ids"], &chat["token_ids"]),
        (&raw["prompt_ids"], &raw["token_ids"])
    );
    assert_eq!(
        (&chat["settings"]["prompt_mode"], &raw["settings"]["prompt_mode"]),
        (&"chat".into(), &"raw".into())
    );
    let system = run_json(&[
        "Tell me a story.",
        "--chat",
        "--system",
        "Be brief.",
        "-n",
        "3",
        "--greedy",
    ]);
    assert!(ids(&system, "prompt_ids").len() > ids(&chat, "prompt_ids").len());
    let piped = horizon_with_input(
        &["run", "--chat", "--json", "-n", "3", "--greedy"],
        "Tell me a story.\n",
    )
    .ok();
    assert_eq!(
        piped.json()["prompt_ids"],
        chat["prompt_ids"],
        "the line break of a pipe is no part of a message"
    );
}

#[test]
fn answers_end_for_a_named_reason() {
    let greedy = |more: &[&str]| run_json(&[&[STORY, "--greedy"], more].concat());
    let plain = greedy(&["-n", "30"]);
    let text = plain["text"].as_str().expect("a text");
    // A stop string that spans several tokens.
    let stop = &text[10..25];
    let stopped = greedy(&["-n", "30", "--stop", "not in the text", "--stop", stop]);
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_string"]),
        (&"stop_string".into(), &stop.into())
    );
    assert_eq!(
        stopped["text"].as_str(),
        Some(&text[..text.find(stop).expect("is there")])
    );
    let none = greedy(&["-n", "0"]);
    assert_eq!(
        (ids(&none, "token_ids").len(), &none["stop_reason"]),
        (0, &"max_tokens".into())
    );
    let full = greedy(&["--ctx", "20", "-n", "300"]);
    assert_eq!(
        (ids(&full, "token_ids").len(), &full["stop_reason"]),
        (16, &"context_full".into())
    );
    let ended = greedy(&["-n", "900"]);
    assert_eq!(
        (&ended["stop_reason"], ids(&ended, "token_ids").last()),
        (&"eos".into(), Some(&0))
    );
    assert!(!ended["text"].as_str().expect("a text").contains("<|endoftext|>"));
    let n = (ids(&ended, "token_ids").len() + 5).to_string();
    let on = greedy(&["-n", &n, "--ignore-eos"]);
    assert!(
        on["text"].as_str().expect("a text").contains("<|endoftext|>") && on["stop_reason"] == "max_tokens"
    );
    let hidden = greedy(&["-n", &n, "--ignore-eos", "--special-tokens", "hide"]);
    assert_eq!(hidden["token_ids"], on["token_ids"]);
    assert!(!hidden["text"].as_str().expect("a text").contains("<|endoftext|>"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = super::command(&["run", STORY, "-n", "900", "--ignore-eos"])
        .spawn()
        .expect("the program starts");
    let mut stdout = child.stdout.take().expect("is piped");
    stdout.read_exact(&mut [0; 8]).expect("some text comes");
    drop(stdout);
    let done = super::Done::of(child.wait_with_output().expect("the program ends")).ok();
    assert!(!done.stderr.contains("error"), "{}", done.stderr);
}
