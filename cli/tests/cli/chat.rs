//! `horizon chat`, and Ctrl-C.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{Done, command, horizon_with_input, ids};

fn turns(args: &[&str], input: &str) -> Vec<Value> {
    let done = horizon_with_input(&[&["chat", "--json"], args].concat(), input).ok();
    done.stdout
        .lines()
        .map(|l| serde_json::from_str(l).expect("a line of JSON a turn"))
        .collect()
}

#[test]
fn turns_remember_each_other_until_a_reset() {
    let input = "Tell me a story.\n\nTell me more.\n/reset\nTell me a story.\n/exit\nnot reached\n";
    let t = turns(&["--greedy", "-n", "20"], input);
    assert_eq!(t.len(), 3);
    assert_eq!(
        t.iter().map(|v| v["turn"].as_u64()).collect::<Vec<_>>(),
        [Some(0), Some(1), Some(2)]
    );
    let (first, second) = (ids(&t[0], "prompt_ids"), ids(&t[1], "prompt_ids"));
    assert!(second.starts_with(&first[..first.len() - 1]) && second.len() > first.len() + 20);
    assert!(t[1]["timings"]["reused_tokens"].as_u64() >= Some(first.len() as u64 - 1));
    assert_eq!(
        (&t[2]["prompt_ids"], &t[2]["text"]),
        (&t[0]["prompt_ids"], &t[0]["text"])
    );
    assert_eq!(t[2]["timings"]["reused_tokens"], 0);
    assert_eq!(
        (&t[0]["user"], &t[0]["settings"]["prompt_mode"]),
        (&"Tell me a story.".into(), &"chat".into())
    );
}

#[test]
fn a_turn_that_reuses_equals_a_fresh_one() {
    let t = turns(&["--greedy", "-n", "24"], "Tell me a story.\nTell me more.\n");
    // The same conversation, rendered by hand and run at once.
    let text = |i: usize| t[i]["text"].as_str().expect("a text");
    let prompt = horizon_models::tokenizer::Tokenizer::from_bytes(
        &horizon_models::demo::embedded().expect("sound").files["tokenizer.json"],
    )
    .expect("sound")
    .decode(
        &ids(&t[1], "prompt_ids")
            .iter()
            .map(|i| u32::try_from(*i).expect("an id"))
            .collect::<Vec<_>>(),
        false,
    )
    .expect("decodes");
    assert!(prompt.contains(text(0)));
    let fresh = super::run_json(&[&prompt, "--greedy", "-n", "24"]);
    assert_eq!(ids(&fresh, "prompt_ids"), ids(&t[1], "prompt_ids"));
    assert_eq!(fresh["token_ids"], t[1]["token_ids"]);
}

#[test]
fn the_seed_of_a_conversation_is_told_and_brings_it_back() {
    let talk = |args: &[&str]| {
        let done = horizon_with_input(&[&["chat", "-n", "8"], args].concat(), "Hello.\nHello.\n").ok();
        let seed = done
            .stderr
            .split("seed ")
            .nth(1)
            .and_then(|s| s.split(' ').next())
            .map(str::to_owned);
        (done.stdout, seed)
    };
    let (text, seed) = talk(&[]);
    let seed = seed.expect("is told");
    assert_eq!(talk(&["--seed", &seed]), (text, Some(seed)));
    assert_eq!(talk(&["--greedy"]).1, None);
}

#[test]
fn a_system_message_stays_and_seeds_follow_the_turn() {
    let plain = turns(&["--seed", "7", "-n", "8"], "Hello.\nHello.\n");
    let system = turns(
        &["--seed", "7", "-n", "8", "--system", "Be kind."],
        "Hello.\n/reset\nHello.\n",
    );
    assert!(ids(&system[0], "prompt_ids").len() > ids(&plain[0], "prompt_ids").len());
    assert_eq!(system[0]["prompt_ids"], system[1]["prompt_ids"]);
    assert_eq!(
        (plain[0]["seed"].as_u64(), plain[1]["seed"].as_u64()),
        (Some(7), Some(8))
    );
    assert_eq!(
        turns(&["--seed", "7", "-n", "8"], "Hello.\nHello.\n")[1]["text"],
        plain[1]["text"]
    );
}

#[test]
fn text_goes_to_stdout_and_the_rest_to_stderr() {
    let done = horizon_with_input(&["chat", "--greedy", "-n", "12"], "Tell me a story.\n/what\n").ok();
    assert_eq!(done.stdout.lines().count(), 1, "{}", done.stdout);
    assert!(
        done.stderr.contains("tok/s") && done.stderr.contains("/what: unknown"),
        "{}",
        done.stderr
    );
}

#[test]
fn a_conversation_longer_than_the_context_is_a_clear_error() {
    let done = horizon_with_input(
        &["chat", "--ctx", "16", "-n", "4"],
        "Tell me a very long story about a cat and a dog.\n",
    );
    done.fails(1, &["the context holds 16", "--ctx"]);
}

/// Sends SIGINT, as Ctrl-C does.
fn interrupt(pid: u32) {
    let status = Command::new("kill")
        .args(["-INT", &pid.to_string()])
        .status()
        .expect("kill is there");
    assert!(status.success());
}

#[test]
#[cfg(unix)]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    // The reference backend gives the signal time to arrive.
    let line = [
        "chat",
        "--ignore-eos",
        "--greedy",
        "-n",
        "1000",
        "--backend",
        "cpu-reference",
    ];
    let mut child = command(&line)
        .stdin(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("is piped");
    let mut stdout = BufReader::new(child.stdout.take().expect("is piped"));
    let mut stderr = BufReader::new(child.stderr.take().expect("is piped"));
    let mut summary = String::new();
    for question in ["Tell me a story.\n", "And another.\n"] {
        stdin.write_all(question.as_bytes()).expect("the program reads");
        stdout.read_exact(&mut [0; 4]).expect("an answer begins");
        interrupt(child.id());
        let mut answer = String::new();
        stdout.read_line(&mut answer).expect("the answer ends");
        while !summary.contains("interrupted") {
            assert_ne!(
                stderr.read_line(&mut summary).expect("the program speaks"),
                0,
                "{summary}"
            );
        }
        summary.clear();
        // What is left of the answer's own lines.
        while stdout.buffer().contains(&b'\n') {
            stdout.read_line(&mut answer).expect("is buffered");
        }
    }
    drop(stdin);
    let mut rest = String::new();
    stdout
        .read_to_string(&mut rest)
        .expect("the program ends its output");
    assert_eq!(child.wait().expect("the program ends").code(), Some(0));
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_a_run_with_130_and_keeps_what_was_said() {
    let line = [
        "run",
        "Once upon a time",
        "--ignore-eos",
        "--greedy",
        "-n",
        "1000",
        "--backend",
        "cpu-reference",
    ];
    let mut child = command(&line).spawn().expect("the program starts");
    let mut begun = [0; 4];
    child
        .stdout
        .as_mut()
        .expect("is piped")
        .read_exact(&mut begun)
        .expect("an answer begins");
    interrupt(child.id());
    let done = Done::of(child.wait_with_output().expect("the program ends"));
    assert_eq!(done.code, 130);
    assert!(
        done.stderr.contains("tok/s") && done.stderr.contains("interrupted"),
        "{}",
        done.stderr
    );
}
