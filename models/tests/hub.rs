//! Downloads against a mock hub on 127.0.0.1; no test here touches a network.
#![cfg(feature = "hub")]

mod mock_hub;

use std::fs;
use std::path::Path;

use horizon_models::hub::{Fetched, HubError, HubSettings, RepoId, fetch};
use mock_hub::{COMMIT, MockFile, MockHub, sha256};

fn small(text: &str) -> MockFile {
    MockFile {
        bytes: text.as_bytes().to_vec(),
        ..MockFile::default()
    }
}

fn large(n: usize) -> MockFile {
    let bytes = (0..n)
        .map(|i| u8::try_from(i.wrapping_mul(2_654_435_761) >> 7 & 0xff).expect("masked"))
        .collect();
    MockFile {
        bytes,
        large: true,
        ..MockFile::default()
    }
}

fn repo() -> RepoId {
    RepoId::parse("org/name").expect("a repository")
}

fn get(hub: &MockHub, cache: &Path) -> Result<Fetched, HubError> {
    fetch(&repo(), &hub.settings(cache), &mut |_| {})
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|d| {
            d.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
                .collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

fn blobs(cache: &Path) -> Vec<String> {
    let mut names = names(&cache.join("models--org--name/blobs"));
    names.retain(|n| !n.ends_with(".lock"));
    names
}

fn checkpoint() -> Vec<(&'static str, MockFile)> {
    vec![
        ("config.json", small("{}")),
        ("generation_config.json", small("{\"eos_token_id\": 1}")),
        ("tokenizer.json", small("{\"model\": {}}")),
        ("tokenizer_config.json", small("{\"a\": 1}")),
        ("chat_template.jinja", small("{{ messages }}")),
        ("model.safetensors", large(300_000)),
        ("README.md", small("# no")),
        ("consolidated.safetensors", large(10)),
        ("pytorch_model.bin", large(10)),
        ("original", small("no")),
    ]
}

#[test]
fn fetches_what_is_needed_once_and_then_works_without_a_network() {
    let cache = tempfile::tempdir().expect("a directory");
    let hub = MockHub::start(&checkpoint());
    let mut reports = Vec::new();
    let fetched = fetch(&repo(), &hub.settings(cache.path()), &mut |p| {
        reports.push((p.file.to_owned(), p.file_bytes, p.total_bytes));
    })
    .expect("downloads");
    assert_eq!(
        fetched.dir,
        cache.path().join("models--org--name/snapshots").join(COMMIT)
    );
    let want = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&fetched.dir), want);
    for name in want {
        assert_eq!(
            fs::read(fetched.dir.join(name)).expect("there"),
            hub.state().files[name].bytes,
            "{name}"
        );
    }
    let bytes: u64 = want
        .iter()
        .map(|n| hub.state().files[*n].bytes.len() as u64)
        .sum();
    assert_eq!((fetched.fetched_bytes, fetched.not_refreshed), (bytes, None));
    assert!(
        reports.windows(2).all(|w| w[0].2.0 <= w[1].2.0),
        "progress goes forward"
    );
    assert_eq!(reports.last().expect("reports").2, (bytes, bytes));
    assert!(
        reports
            .iter()
            .any(|r| r.0 == "model.safetensors" && r.1 == (300_000, 300_000))
    );
    assert!(blobs(cache.path()).iter().all(|b| !b.ends_with(".part")));

    // Other programs find it where they look for it.
    let elsewhere = hf_hub::Cache::new(cache.path().to_owned()).model("org/name".to_owned());
    assert_eq!(
        elsewhere.get("model.safetensors"),
        Some(fetched.dir.join("model.safetensors"))
    );

    // A second run asks once and fetches nothing.
    hub.state().seen.clear();
    let again = get(&hub, cache.path()).expect("is there");
    assert_eq!((again.fetched_bytes, &again.dir), (0, &fetched.dir));
    assert_eq!(hub.state().seen.len(), 1);

    // Without a hub the copy is taken as it is, and that is said; HF_HUB_OFFLINE does not even ask.
    let settings = hub.settings(cache.path());
    drop(hub);
    let stale = fetch(&repo(), &settings, &mut |_| {}).expect("is there");
    assert!(stale.not_refreshed.is_some_and(|r| r.contains("127.0.0.1")));
    let offline = fetch(
        &repo(),
        &HubSettings {
            offline: true,
            ..settings.clone()
        },
        &mut |_| {},
    )
    .expect("is there");
    assert_eq!((offline.not_refreshed, offline.dir), (None, fetched.dir.clone()));
    // Not so an incomplete one.
    fs::remove_file(fetched.dir.join("model.safetensors")).expect("was there");
    let error = fetch(&repo(), &settings, &mut |_| {}).expect_err("no hub");
    assert!(matches!(&error, HubError::Network { .. }), "{error}");
    assert!(error.to_string().contains("directory of a local copy"), "{error}");
    let error = fetch(
        &repo(),
        &HubSettings {
            offline: true,
            ..settings
        },
        &mut |_| {},
    )
    .expect_err("incomplete");
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let cache = tempfile::tempdir().expect("a directory");
    let hub = MockHub::start(&checkpoint());
    hub.state().token = Some("hf_secret".to_owned());
    let settings = HubSettings {
        token: Some("hf_secret".to_owned()),
        ..hub.settings(cache.path())
    };
    fetch(&repo(), &settings, &mut |_| {}).expect("downloads");
    let seen = hub.state().seen.clone();
    assert!(seen.iter().any(|s| s.elsewhere), "large files lie elsewhere");
    for request in seen {
        assert_eq!(request.token.is_some(), !request.elsewhere, "{request:?}");
    }
    assert!(matches!(
        fetch(
            &repo(),
            &HubSettings {
                token: Some("a\nb".to_owned()),
                ..settings
            },
            &mut |_| {}
        ),
        Err(HubError::Token)
    ));
}

#[test]
fn a_cut_connection_is_resumed() {
    let cache = tempfile::tempdir().expect("a directory");
    let mut files = checkpoint();
    files[5].1.cuts = vec![100_000, 50_000];
    let hub = MockHub::start(&files);
    let fetched = get(&hub, cache.path()).expect("downloads");
    assert_eq!(
        fs::read(fetched.dir.join("model.safetensors")).expect("there"),
        files[5].1.bytes
    );
    let ranges: Vec<_> = hub
        .transfers("model.safetensors")
        .into_iter()
        .map(|s| s.range.expect("a range"))
        .collect();
    assert_eq!(ranges, ["bytes=0-", "bytes=100000-", "bytes=150000-"]);
}

#[test]
fn a_later_run_goes_on_where_an_earlier_one_stopped() {
    let cache = tempfile::tempdir().expect("a directory");
    let mut files = checkpoint();
    files[5].1.cuts = vec![120_000, 0, 0, 0];
    let hub = MockHub::start(&files);
    let error = get(&hub, cache.path()).expect_err("cut for good");
    assert!(
        matches!(
            error,
            HubError::Interrupted {
                received: 120_000,
                announced: 300_000,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        blobs(cache.path()).iter().any(|b| b.ends_with(".part")),
        "what is there is kept"
    );
    hub.state().seen.clear();
    let fetched = get(&hub, cache.path()).expect("downloads");
    assert_eq!(fetched.fetched_bytes, 180_000);
    assert_eq!(
        fs::read(fetched.dir.join("model.safetensors")).expect("there"),
        files[5].1.bytes
    );
    assert_eq!(
        hub.transfers("model.safetensors")[0].range.as_deref(),
        Some("bytes=120000-")
    );

    // A part that is complete already is only put in its place, and one that is too long starts again.
    for length in [300_000, 300_001] {
        let cache = tempfile::tempdir().expect("a directory");
        let dir = cache.path().join("models--org--name/blobs");
        fs::create_dir_all(&dir).expect("made");
        let mut part = files[5].1.bytes.clone();
        part.resize(length, 0);
        fs::write(dir.join(format!("{}.part", sha256(&files[5].1.bytes))), part).expect("written");
        let fetched = get(&hub, cache.path()).expect("downloads");
        assert_eq!(
            fs::read(fetched.dir.join("model.safetensors")).expect("there"),
            files[5].1.bytes
        );
    }
}

#[test]
fn a_server_without_ranges_starts_again() {
    let cache = tempfile::tempdir().expect("a directory");
    let mut files = checkpoint();
    files[5].1.cuts = vec![100_000];
    files[5].1.no_ranges = true;
    let hub = MockHub::start(&files);
    let fetched = get(&hub, cache.path()).expect("downloads");
    assert_eq!(
        fs::read(fetched.dir.join("model.safetensors")).expect("there"),
        files[5].1.bytes
    );
}

/// A file that is not what the hub announced never enters the cache, and leaves nothing behind.
#[test]
fn wrong_size_and_wrong_content() {
    let announced = [Some(299_999), Some(300_001), Some(1)];
    for (announced, etag) in announced
        .into_iter()
        .map(|a| (a, None))
        .chain([(None, Some("ab".repeat(32)))])
    {
        for cuts in [vec![], vec![10]] {
            let cache = tempfile::tempdir().expect("a directory");
            let mut files = checkpoint();
            (files[5].1.announced, files[5].1.etag, files[5].1.cuts) = (announced, etag.clone(), cuts);
            let hub = MockHub::start(&files);
            let error = get(&hub, cache.path()).expect_err("not what was announced");
            match announced {
                Some(_) => assert!(matches!(error, HubError::Size { .. }), "{announced:?}: {error}"),
                None => assert!(matches!(error, HubError::Checksum { .. }), "{error}"),
            }
            assert!(error.to_string().contains("model.safetensors"), "{error}");
            let snapshot = cache.path().join("models--org--name/snapshots").join(COMMIT);
            assert!(!names(&snapshot).contains(&"model.safetensors".to_owned()));
            assert_eq!(
                blobs(cache.path()).len(),
                names(&snapshot).len(),
                "no leftover in blobs"
            );
        }
    }
    // A server that does not say how long its answer is has to be counted.
    for (announced, name) in [(299_999, "longer"), (300_001, "shorter")] {
        let cache = tempfile::tempdir().expect("a directory");
        let mut files = checkpoint();
        (files[5].1.announced, files[5].1.no_lengths) = (Some(announced), true);
        let error = get(&MockHub::start(&files), cache.path()).expect_err(name);
        let kept = matches!(error, HubError::Size { .. } | HubError::Interrupted { .. });
        assert!(kept, "{name}: {error}");
        let snapshot = cache.path().join("models--org--name/snapshots").join(COMMIT);
        assert!(!names(&snapshot).contains(&"model.safetensors".to_owned()));
    }
    // The size of a file that does not redirect comes from the answer itself.
    let cache = tempfile::tempdir().expect("a directory");
    let mut files = checkpoint();
    files[2].1.announced = Some(1000);
    let error = get(&MockHub::start(&files), cache.path()).expect_err("not what was announced");
    assert!(matches!(error, HubError::Size { announced: 1000, .. }), "{error}");
}

#[test]
fn shards_come_from_the_index() {
    let index = r#"{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors",
                   "b": "model-00002-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}}"#;
    let mut files = vec![
        ("config.json", small("{}")),
        ("model.safetensors.index.json", small(index)),
        ("model-00001-of-00002.safetensors", large(1000)),
        ("model-00002-of-00002.safetensors", large(2000)),
        ("model.safetensors", large(10)),
    ];
    let cache = tempfile::tempdir().expect("a directory");
    let fetched = get(&MockHub::start(&files), cache.path()).expect("downloads");
    assert_eq!(fetched.fetched_bytes, 3002 + index.len() as u64);
    assert!(!fetched.dir.join("model.safetensors").exists());

    files.remove(3);
    let cache = tempfile::tempdir().expect("a directory");
    let error = get(&MockHub::start(&files), cache.path()).expect_err("a shard is missing");
    assert!(
        matches!(&error, HubError::Incomplete { file, .. } if file.contains("00002")),
        "{error}"
    );

    for map in [
        r#"{"a": "../../evil.safetensors"}"#,
        r#"{"a": "/etc/x.safetensors"}"#,
        r#"{"a": 7}"#,
        "{}",
    ] {
        files[1].1 = small(&format!("{{\"weight_map\": {map}}}"));
        let cache = tempfile::tempdir().expect("a directory");
        let error = get(&MockHub::start(&files), cache.path()).expect_err(map);
        assert!(matches!(&error, HubError::Protocol { .. }), "{error}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    type Change = fn(&mut mock_hub::State);
    let cases: [(&str, Change, &str); 9] = [
        (
            "no such repository",
            |s| {
                s.listing_status = Some(404);
                s.files.clear();
            },
            "no such model repository",
        ),
        (
            "gated, by the listing",
            |s| s.listing_status = Some(401),
            "set HF_TOKEN",
        ),
        (
            "gated, by the file",
            |s| s.files.get_mut("model.safetensors").expect("there").status = Some(403),
            "HTTP 403",
        ),
        ("broken hub", |s| s.listing_status = Some(503), "HTTP 503"),
        (
            "not a hub",
            |s| s.listing_body = Some("<html>".to_owned()),
            "not the answer of a Hugging Face hub",
        ),
        (
            "no commit",
            |s| s.listing_body = Some(r#"{"siblings": []}"#.to_owned()),
            "no commit",
        ),
        (
            "a commit that leads elsewhere",
            |s| s.listing_body = Some(r#"{"sha": "../..", "siblings": []}"#.to_owned()),
            "no commit",
        ),
        (
            "no weights",
            |s| s.files.retain(|n, _| !n.ends_with(".safetensors")),
            "safetensors",
        ),
        (
            "no configuration",
            |s| {
                s.files.remove("config.json");
            },
            "config.json",
        ),
    ];
    for (what, change, says) in cases {
        let cache = tempfile::tempdir().expect("a directory");
        let hub = MockHub::start(&checkpoint());
        change(&mut hub.state());
        let error = get(&hub, cache.path()).expect_err(what).to_string();
        assert!(error.contains(says), "{what}: {error}");
    }
    // With a token that does not suffice the advice is another one.
    let cache = tempfile::tempdir().expect("a directory");
    let hub = MockHub::start(&checkpoint());
    hub.state().token = Some("right".to_owned());
    let settings = HubSettings {
        token: Some("wrong".to_owned()),
        ..hub.settings(cache.path())
    };
    let error = fetch(&repo(), &settings, &mut |_| {})
        .expect_err("wrong token")
        .to_string();
    assert!(
        error.contains("HTTP 401") && error.contains("accept the model's terms"),
        "{error}"
    );
    // Names that come from the hub never lead out of the cache.
    for (field, value) in [("etag", "../../../../evil"), ("commit", "../evil")] {
        let mut files = checkpoint();
        let file = &mut files[0].1;
        *(if field == "etag" {
            &mut file.etag
        } else {
            &mut file.commit
        }) = Some(value.to_owned());
        let error = get(&MockHub::start(&files), cache.path()).expect_err(value);
        assert!(matches!(error, HubError::Protocol { .. }), "{error}");
    }
    for endpoint in ["ftp://127.0.0.1", "127.0.0.1:1", "", "http://"] {
        let settings = HubSettings {
            endpoint: endpoint.to_owned(),
            ..hub.settings(cache.path())
        };
        assert!(
            matches!(fetch(&repo(), &settings, &mut |_| {}), Err(HubError::Endpoint(_))),
            "{endpoint}"
        );
    }
}

#[test]
fn a_repository_that_changes_meanwhile() {
    let cache = tempfile::tempdir().expect("a directory");
    let mut files = checkpoint();
    files[5].1.commit = Some("f".repeat(40));
    let error = get(&MockHub::start(&files), cache.path()).expect_err("changed");
    assert!(matches!(error, HubError::Changed { .. }), "{error}");
}

/// Hubs differ: some list nothing, some have moved the repository, revisions can have slashes.
#[test]
fn unusual_hubs() {
    let cache = tempfile::tempdir().expect("a directory");
    let hub = MockHub::start(&checkpoint());
    hub.state().listing_status = Some(404);
    let fetched = get(&hub, cache.path()).expect("downloads");
    assert_eq!(names(&fetched.dir).len(), 6);

    let cache = tempfile::tempdir().expect("a directory");
    hub.state().listing_status = None;
    hub.state().renamed = Some(("org/name".to_owned(), "new/place".to_owned()));
    let fetched = get(&hub, cache.path()).expect("downloads");
    assert_eq!(names(&fetched.dir).len(), 6);
    assert!(!blobs(cache.path()).contains(&"of-the-redirect".to_owned()));

    // The hub's ETag names the content, not that of the host that it redirects to.
    let cache = tempfile::tempdir().expect("a directory");
    hub.state().renamed = None;
    hub.state()
        .files
        .get_mut("model.safetensors")
        .expect("there")
        .plain_redirect = true;
    get(&hub, cache.path()).expect("downloads");
    assert!(blobs(cache.path()).contains(&sha256(&hub.state().files["model.safetensors"].bytes)));

    hub.state().seen.clear();
    let branch = RepoId::parse("org/name@refs/pr/3").expect("a revision");
    let fetched = fetch(&branch, &hub.settings(cache.path()), &mut |_| {}).expect("downloads");
    assert_eq!(fetched.commit, COMMIT);
    assert!(hub.state().seen.iter().all(|s| s.path.contains("refs%2Fpr%2F3")));
    let head = fs::read_to_string(cache.path().join("models--org--name/refs/refs/pr/3"));
    assert_eq!(head.expect("recorded"), COMMIT);
}

#[test]
fn two_at_once_fetch_once() {
    let cache = tempfile::tempdir().expect("a directory");
    let hub = MockHub::start(&checkpoint());
    let fetched: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| get(&hub, cache.path()))).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("no panic").expect("downloads"))
            .collect()
    });
    assert_eq!(fetched[0].dir, fetched[1].dir);
    assert_eq!(hub.transfers("model.safetensors").len(), 1);
}
