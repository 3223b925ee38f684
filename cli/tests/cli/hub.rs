//! `-m org/name`, against a hub on 127.0.0.1.

use std::path::Path;

use super::mock_hub::{COMMIT, MockFile, MockHub};
use super::{Done, command, run_json};

fn run(endpoint: &str, cache: &Path, more: &[&str]) -> Done {
    let line = ["run", "Once upon a time", "-n", "12", "--seed", "3", "--json"];
    let output = command(&[&line, more].concat())
        .env("HF_HOME", cache)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_TOKEN", "secret")
        .output();
    Done::of(output.expect("the program starts"))
}

#[test]
fn a_repository_is_downloaded_once_and_runs_without_the_hub_afterwards() {
    let demo = horizon_models::demo::embedded().expect("the asset is sound");
    let file = |bytes: &[u8], large| MockFile {
        bytes: bytes.to_vec(),
        large,
        ..MockFile::default()
    };
    let mut files: Vec<(&str, MockFile)> = demo
        .files
        .iter()
        .map(|(n, b)| (n.as_str(), file(b, false)))
        .collect();
    files.push(("model.safetensors", file(&demo.safetensors, true)));
    let hub = MockHub::start(&files);
    let endpoint = hub.endpoint.clone();
    let folder = tempfile::tempdir().expect("a folder");

    let first = run(&endpoint, folder.path(), &["-m", "org/name"]).ok();
    assert!(
        first.stderr.contains("downloaded") && first.stderr.contains(COMMIT),
        "{}",
        first.stderr
    );
    let first = first.json();
    let embedded = run_json(&["Once upon a time", "-n", "12", "--seed", "3"]);
    assert_eq!(
        (&first["token_ids"], &first["text"]),
        (&embedded["token_ids"], &embedded["text"])
    );
    assert_eq!(first["settings"]["model"]["kind"], "checkpoint");
    assert!(
        first["settings"]["model"]["place"]
            .as_str()
            .is_some_and(|p| p.contains(COMMIT))
    );
    assert_eq!(hub.transfers("model.safetensors").len(), 1);
    run(&endpoint, folder.path(), &["-m", "org/name"]).ok();
    assert_eq!(
        hub.transfers("model.safetensors").len(),
        1,
        "what is in the cache is not fetched again"
    );

    let mut state = hub.state();
    state.listing_status = Some(404);
    state.files.clear();
    drop(state);
    run(&endpoint, folder.path(), &["-m", "org/other"]).code_and_error(1, "org/other: not a directory here");
    drop(hub);
    let offline = run(&endpoint, folder.path(), &["-m", "org/name"]).ok();
    assert!(offline.stderr.contains("cannot be reached"), "{}", offline.stderr);
    assert_eq!(offline.json()["token_ids"], embedded["token_ids"]);
}
