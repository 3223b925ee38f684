//! Damaged, truncated and forged artifacts: an error that names the file, never a panic, never other contents.

use std::fs;

use horizon_core::artifact::header;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;

/// Where the digits of the manifest's own SHA-256 stand.
const DIGITS: std::ops::Range<usize> = 24..88;

fn reseal(manifest: &mut [u8]) {
    manifest[DIGITS].fill(b'0');
    let digest = Digest::of(manifest).to_string();
    manifest[DIGITS].copy_from_slice(digest.as_bytes());
}

#[test]
fn every_flipped_byte_is_an_error_that_names_the_file() {
    let (_dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    for (name, bytes) in files_in(&dest) {
        let path = dest.join(&name);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&path, &bad).expect("write");
            for check in [Check::Checksum, Check::Sha256] {
                let error = read_all(&dest, check).expect_err(&format!("{name} byte {at}"));
                assert!(error.to_string().contains(&name), "{name} byte {at}: {error}");
            }
            let problems = verify(&dest, &Silent).expect_err(&format!("{name} byte {at}"));
            assert!(
                problems.iter().all(|p| p.to_string().contains(&name)),
                "{name} byte {at}: {problems:?}"
            );
        }
        fs::write(&path, &bytes).expect("write");
    }
    verify(&dest, &Silent).expect("whole again");
}

#[test]
fn every_other_length_is_an_error_that_names_the_file() {
    let (_dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    for (name, bytes) in files_in(&dest) {
        let path = dest.join(&name);
        let longer = [bytes.as_slice(), b" "].concat();
        let lengths = (0..bytes.len()).chain([bytes.len() + 1]);
        for n in lengths {
            fs::write(&path, &longer[..n]).expect("write");
            let error = read_all(&dest, Check::Checksum).expect_err(&format!("{name} of {n} bytes"));
            assert!(error.to_string().contains(&name), "{name} of {n} bytes: {error}");
            assert!(verify(&dest, &Silent).is_err(), "{name} of {n} bytes");
        }
        fs::remove_file(&path).expect("remove");
        let error = read_all(&dest, Check::Checksum).expect_err(&format!("{name} removed"));
        assert!(error.to_string().contains(&name), "{name} removed: {error}");
        assert!(verify(&dest, &Silent).is_err(), "{name} removed");
        fs::write(&path, &bytes).expect("write");
    }
}

#[test]
fn verification_lists_every_damaged_tensor() {
    let (_dir, dest) = scratch();
    let (sealed, _) = write(&dest, false, 64).expect("written");
    for (shard, tensor) in [(0, 1), (1, 0)] {
        let record = &sealed.shards[shard];
        let path = dest.join(&record.name);
        let mut bytes = fs::read(&path).expect("shard");
        bytes[usize::try_from(record.tensors[tensor].offset).expect("small")] ^= 0x80;
        fs::write(&path, bytes).expect("write");
    }
    let problems: Vec<String> = verify(&dest, &Silent)
        .expect_err("damaged")
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(problems.len(), 2);
    assert!(
        problems[0].contains("embed") && problems[0].contains(&shard_name(0, 2)),
        "{problems:?}"
    );
    assert!(
        problems[1].contains("expert.codes") && problems[1].contains(&shard_name(1, 2)),
        "{problems:?}"
    );
}

#[test]
fn another_version_and_another_format_say_so() {
    let (_dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    let path = dest.join(MANIFEST_FILE);
    let text = fs::read_to_string(&path).expect("manifest");
    fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).expect("write");
    let error = Artifact::open(&dest).expect_err("version 2");
    assert!(
        matches!(
            error,
            ArtifactError::Version {
                found: 2,
                supported: 1,
                ..
            }
        ),
        "{error}"
    );
    fs::write(&path, r#"{"format": "other", "version": 1}"#).expect("write");
    let error = Artifact::open(&dest).expect_err("another format").to_string();
    assert!(error.contains("not a manifest of"), "{error}");
    fs::remove_file(&path).expect("remove");
    assert!(matches!(Artifact::open(&dest), Err(ArtifactError::NoManifest(_))));
}

/// Text of a number that a forger might write.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(u64::MAX.to_string()),
        Just(i64::MAX.to_string()),
        Just((1u64 << 32).to_string()),
        Just("-1".to_owned()),
        Just("1e308".to_owned()),
        Just("0.5".to_owned()),
        Just("null".to_owned()),
        Just("\"\"".to_owned()),
        (0u64..3000).prop_map(|n| n.to_string()),
        any::<u64>().prop_map(|n| n.to_string()),
    ]
}

/// Positions of the whole numbers in JSON text, digests and names apart.
fn numbers(text: &[u8]) -> Vec<std::ops::Range<usize>> {
    let (mut out, mut quoted, mut at) = (Vec::new(), false, 0);
    while at < text.len() {
        if text[at] == b'"' {
            quoted = !quoted;
        } else if !quoted && text[at].is_ascii_digit() {
            let end = at + text[at..].iter().take_while(|c| c.is_ascii_digit()).count();
            out.push(at..end);
            at = end;
            continue;
        }
        at += 1;
    }
    out
}

/// Opens and reads what was forged. All tensors have digests, so what is read must be what was written.
fn survives(dest: &Path, honest: &Contents) -> Result<(), TestCaseError> {
    if let Ok((_, tensors)) = read_all(dest, Check::Checksum) {
        for (name, bytes) in &tensors {
            prop_assert_eq!(honest.1.get(name), Some(bytes));
        }
    }
    let _ = verify(dest, &Silent);
    Ok(())
}

#[test]
fn a_forged_manifest_with_a_right_digest_gives_no_panic_and_no_other_bytes() {
    let (_dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    let path = dest.join(MANIFEST_FILE);
    let honest = fs::read(&path).expect("manifest");
    let contents = read_all(&dest, Check::Checksum).expect("sound");
    let places = numbers(&honest);
    assert!(places.len() > 40, "the manifest has numbers to forge");
    let edits = prop::collection::vec((any::<prop::sample::Index>(), number()), 1..3);
    proptest!(ProptestConfig::with_cases(2000), |(edits in edits)| {
        let mut forged = honest.clone();
        let mut edits: Vec<_> = edits.iter().map(|(i, n)| (places[i.index(places.len())].clone(), n)).collect();
        edits.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
        edits.dedup_by_key(|(range, _)| range.start);
        for (range, text) in edits {
            forged.splice(range, text.bytes());
        }
        reseal(&mut forged);
        fs::write(&path, &forged).expect("write");
        survives(&dest, &contents)?;
    });
}

#[test]
fn forged_names_stay_inside_the_directory() {
    let (dir, dest) = scratch();
    write(&dest, false, 64).expect("written");
    fs::write(dir.path().join("secret"), b"{\"a\": 1}\n").expect("write");
    let path = dest.join(MANIFEST_FILE);
    let text = fs::read_to_string(&path).expect("manifest");
    for name in [
        "../secret",
        "/etc/passwd",
        "..",
        "",
        "a/b",
        "tokenizer.json",
        MANIFEST_FILE,
    ] {
        let mut forged = text
            .replace("\"config.json\"", &format!("\"{name}\""))
            .into_bytes();
        reseal(&mut forged);
        fs::write(&path, &forged).expect("write");
        let error = Artifact::open(&dest).expect_err(name).to_string();
        assert!(
            error.contains("plain file name") || error.contains("listed twice"),
            "{name:?}: {error}"
        );
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_parsers_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut sealed = manifest();
        let text = sealed.seal();
        let _ = Manifest::parse(&bytes);
        let mut mixed = text[..cut.index(text.len())].to_vec();
        mixed.extend_from_slice(&bytes);
        prop_assert!(Manifest::parse(&mixed).is_err());
        let _ = header::parse(&bytes, bytes.len() as u64);
    }

    #[test]
    fn a_header_that_is_accepted_covers_the_data_once(
        entries in prop::collection::vec((0u64..4, 0u64..40, 0u64..40, prop::sample::select(vec!["U8", "F16", "F32", "F4", "Q"])), 0..4),
        data in 0u64..60,
    ) {
        let body: Vec<String> = entries
            .iter()
            .map(|(n, a, b, t)| {
                let count = match *t { "F16" => b.saturating_sub(*a) / 2, "F32" => b.saturating_sub(*a) / 4, _ => b.saturating_sub(*a) };
                format!(r#""t{n}":{{"dtype":"{t}","shape":[{count}],"data_offsets":[{a},{b}]}}"#)
            })
            .collect();
        let json = format!("{{{}}}", body.join(","));
        let start = 8 + json.len() as u64;
        if let Ok(found) = header::parse(json.as_bytes(), start + data) {
            let mut at = start;
            for e in found {
                prop_assert_eq!(e.offset, at);
                at += e.bytes;
            }
            prop_assert_eq!(at, start + data);
        }
    }
}
