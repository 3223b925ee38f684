//! What is a repository, and where the hub and the cache are.
#![cfg(feature = "hub")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use horizon_models::hub::{DEFAULT_ENDPOINT, HubError, HubSettings, RepoId};

#[test]
fn what_is_a_repository_and_what_a_path() {
    let parsed = |s: &str| RepoId::parse(s).map(|r| (r.name, r.revision));
    let main = |name: &str| Some((name.to_owned(), "main".to_owned()));
    assert_eq!(
        parsed("allenai/OLMoE-1B-7B-0924"),
        main("allenai/OLMoE-1B-7B-0924")
    );
    assert_eq!(
        parsed("Qwen/Qwen1.5-MoE-A2.7B_x"),
        main("Qwen/Qwen1.5-MoE-A2.7B_x")
    );
    assert_eq!(parsed("a/b@v1.0"), Some(("a/b".to_owned(), "v1.0".to_owned())));
    assert_eq!(
        RepoId::parse("a/b@v1").expect("a repository").to_string(),
        "a/b@v1"
    );
    assert_eq!(RepoId::parse("a/b").expect("a repository").to_string(), "a/b");
    for path in [
        "model",
        "./a/b",
        "../a",
        "../b/c",
        "/a/b",
        "/a",
        "a/b/c",
        "a/",
        "/",
        "",
        "a//b",
        "~/m",
        "a/.b",
        ".a/b",
        "a/b c",
        "a/b@",
        "a/b@..",
        "a/b@x/../y",
        "a/..b..",
        "a\\b/c",
        "a/b@/x",
        "é/b",
    ] {
        assert_eq!(parsed(path), None, "{path}");
    }
}

#[test]
fn settings_from_the_environment() {
    let dir = tempfile::tempdir().expect("a directory");
    let home = dir.path().to_str().expect("UTF-8");
    fs::write(dir.path().join("token"), " hf_file\n").expect("written");
    fs::write(dir.path().join("other"), "hf_other").expect("written");
    let settings = |vars: &[(&str, &str)]| {
        let vars: BTreeMap<String, String> = vars
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        HubSettings::from_variables(|name| vars.get(name).cloned())
    };
    let plain = settings(&[("HOME", "/users/u")]).expect("a cache");
    assert_eq!(plain.cache, Path::new("/users/u/.cache/huggingface/hub"));
    assert_eq!(
        (plain.endpoint.as_str(), plain.token, plain.offline),
        (DEFAULT_ENDPOINT, None, false)
    );
    let hf_home = settings(&[
        ("HOME", "/users/u"),
        ("HF_HOME", home),
        ("HF_ENDPOINT", "http://h:1/"),
    ])
    .expect("a cache");
    assert_eq!(hf_home.cache, dir.path().join("hub"));
    assert_eq!(
        (hf_home.endpoint.as_str(), hf_home.token.as_deref()),
        ("http://h:1", Some("hf_file"))
    );
    let token = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_variable")]).expect("a cache");
    assert_eq!(token.token.as_deref(), Some("hf_variable"));
    let other = dir.path().join("other");
    let token = settings(&[
        ("HF_HOME", home),
        ("HF_TOKEN_PATH", other.to_str().expect("UTF-8")),
    ])
    .expect("a cache");
    assert_eq!(token.token.as_deref(), Some("hf_other"));
    let cache = settings(&[
        ("HF_HUB_CACHE", "/c"),
        ("HF_HOME", home),
        ("HF_HUB_OFFLINE", "True"),
    ])
    .expect("a cache");
    assert_eq!((cache.cache.as_path(), cache.offline), (Path::new("/c"), true));
    let xdg =
        settings(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).expect("a cache");
    assert_eq!(
        (xdg.cache.as_path(), xdg.offline),
        (Path::new("/x/huggingface/hub"), false)
    );
    assert!(matches!(settings(&[("HF_HOME", " ")]), Err(HubError::NoCache)));
}
