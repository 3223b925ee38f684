//! Routing traces on disk, and their replay: the same decisions as the cache's, and never better than the bound.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use horizon_cache::replay::{Contender, PolicyReplay, Workload, simulate};
use horizon_cache::trace::{Trace, TraceError, TraceHeader, TraceWriter, VERSION};
use horizon_cache::{Geometry, HostRecords, Policy, ResidentV1};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::observe::Observation;
use horizon_core::provider::{ExpertProvider, RoutedGroup};
use horizon_core::transport::Completion;
use proptest::prelude::*;

const LAYERS: [LayerId; 2] = [LayerId(1), LayerId(4)];

fn header(experts: usize, top_k: usize) -> TraceHeader {
    TraceHeader {
        version: VERSION,
        model: "a model".into(),
        experts,
        top_k,
        record_bytes: 100,
        layers: LAYERS.to_vec(),
    }
}

/// Pseudo-random numbers below `n`, from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % n as u64).expect("small")
    }
}

/// A trace whose steps have mostly one row, sometimes up to `most`; some experts are liked more than others.
fn trace(seed: u64, experts: usize, top_k: usize, steps: usize, most: usize) -> Trace {
    let mut random = Random(seed);
    let mut writer = TraceWriter::new(header(experts, top_k)).expect("sound");
    for _ in 0..steps {
        let rows = if random.below(4) == 0 {
            1 + random.below(most)
        } else {
            1
        };
        let row = |random: &mut Random| {
            let layer = |random: &mut Random| {
                let mut chosen: Vec<u16> = Vec::new();
                while chosen.len() < top_k {
                    let e = random.below(experts).min(random.below(experts));
                    let e = u16::try_from(e).expect("small");
                    if !chosen.contains(&e) {
                        chosen.push(e);
                    }
                }
                chosen
            };
            LAYERS.iter().map(|_| layer(random)).collect()
        };
        let rows: Vec<Vec<Vec<u16>>> = (0..rows).map(|_| row(&mut random)).collect();
        writer.push_step(&rows).expect("sound");
    }
    writer.finish()
}

#[test]
fn a_trace_reads_back_and_replaces_the_file_whole() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("t.safetensors");
    let written = trace(1, 12, 3, 40, 9);
    trace(2, 12, 3, 4, 9).save(&path).expect("saves another");
    written.save(&path).expect("saves");
    assert_eq!(Trace::load(&path).expect("loads"), written);
    assert_eq!(std::fs::read_dir(dir.path()).expect("lists").count(), 1);
    assert_eq!(written.steps(), 40);
    assert_eq!(
        written.rows().map(<[u16]>::len).sum::<usize>(),
        written.tokens() * 6
    );

    // Any reader of the format sees the documented tensors.
    let bytes = std::fs::read(&path).expect("reads");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let experts = file.tensor("experts").expect("there");
    assert_eq!(experts.shape(), [written.tokens(), 2, 3]);
    assert_eq!(experts.dtype(), safetensors::Dtype::U16);
    let step = file.tensor("step").expect("there");
    assert_eq!(
        (step.shape(), step.dtype()),
        (&[written.tokens()][..], safetensors::Dtype::U32)
    );

    // What is no file stays what it is.
    let error = written.save(dir.path()).expect_err("a directory").to_string();
    assert!(error.contains("not a regular file"), "{error}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        use std::path::Path;
        let link = dir.path().join("link");
        symlink(&path, &link).expect("links");
        assert!(written.save(&link).is_err() && written.save(Path::new("/dev/null")).is_err());
    }

    let nowhere = dir.path().join("missing").join("t");
    assert!(
        written
            .save(&nowhere)
            .expect_err("no such directory")
            .to_string()
            .contains("missing")
    );
    let error = Trace::load(&nowhere).expect_err("no such file");
    assert!(matches!(error, TraceError::Io { .. }), "{error}");
}

#[test]
fn an_empty_trace_is_a_trace() {
    let empty = TraceWriter::new(header(4, 2)).expect("sound").finish();
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("t");
    empty.save(&path).expect("saves");
    let read = Trace::load(&path).expect("loads");
    assert_eq!(read, empty);
    let counts = simulate(&Workload::new(&read), Contender::Policy(Policy::Lru), 2, 2);
    assert_eq!(counts.expect("replays").total().hit_rate(), None);
}

#[test]
fn rows_that_no_router_gives_are_refused_and_record_nothing() {
    let mut writer = TraceWriter::new(header(4, 2)).expect("sound");
    let good = vec![vec![vec![0, 3], vec![1, 2]]];
    writer.push_step(&good).expect("sound");
    let bad: [(&str, Vec<Vec<Vec<u16>>>); 6] = [
        ("at least one row", vec![]),
        ("2 layers of 2 experts", vec![vec![vec![0, 1]]]),
        ("2 layers of 2 experts", vec![vec![vec![0, 1], vec![0]]]),
        ("layer 4 has no expert 4", vec![vec![vec![0, 1], vec![4, 0]]]),
        (
            "layer 1: expert 1 was chosen twice",
            vec![vec![vec![1, 1], vec![0, 1]]],
        ),
        (
            "layer 4: expert 2",
            vec![good[0].clone(), vec![vec![0, 1], vec![2, 2]]],
        ),
    ];
    for (why, rows) in bad {
        let error = writer.push_step(&rows).expect_err(why).to_string();
        assert!(error.contains(why), "{error:?} should say {why:?}");
    }
    assert_eq!(writer.finish().tokens(), 1);

    for (experts, top_k, layers) in [
        (0, 1, LAYERS.to_vec()),
        (4, 0, LAYERS.to_vec()),
        (4, 5, LAYERS.to_vec()),
        (70_000, 2, LAYERS.to_vec()),
        (4, 2, vec![]),
        (4, 2, vec![LayerId(2), LayerId(2)]),
    ] {
        let header = TraceHeader {
            layers,
            ..header(experts, top_k)
        };
        assert!(TraceWriter::new(header.clone()).is_err(), "{header:?}");
    }
}

#[test]
fn a_file_that_is_no_trace_is_neither_replaced_nor_read_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = trace(3, 8, 2, 4, 2);
    // Weights and a prompt: somebody's only copy.
    for (name, bytes) in [
        (
            "weights.safetensors",
            [&40u64.to_le_bytes()[..], &[b' '; 40], &[7; 100]].concat(),
        ),
        ("prompt.txt", b"Once upon a time there was a file".to_vec()),
        ("short", vec![1]),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, &bytes).expect("writes");
        for refused in [
            Trace::check_destination(&path).expect_err("is somebody's"),
            saved.save(&path).expect_err("is somebody's"),
        ] {
            let text = refused.to_string();
            assert!(
                text.contains(name) && text.contains("not a routing trace"),
                "{text}"
            );
        }
        assert_eq!(std::fs::read(&path).expect("still there"), bytes);
        let text = Trace::load(&path).expect_err("no trace").to_string();
        assert!(
            text.contains(name) && text.contains("not a routing trace"),
            "{text}"
        );
    }
    // An empty file and a trace may be replaced.
    let path = folder.path().join("trace");
    std::fs::write(&path, b"").expect("writes");
    saved.save(&path).expect("empty before");
    saved.save(&path).expect("a trace before");
    assert_eq!(Trace::load(&path).expect("loads"), saved);
    // Nothing is read of what only looks large: a header of that length is refused first.
    let path = folder.path().join("large");
    let file = std::fs::File::create(&path).expect("creates");
    file.set_len(3 << 30).expect("sparse");
    assert!(Trace::load(&path).is_err());
    assert!(
        Trace::load(folder.path())
            .expect_err("a folder")
            .to_string()
            .contains("regular file")
    );
}

#[test]
fn a_record_of_no_size_or_of_too_many_bytes_is_refused() {
    for record_bytes in [0, u64::MAX] {
        let header = TraceHeader {
            record_bytes,
            ..header(8, 2)
        };
        assert!(matches!(TraceWriter::new(header), Err(TraceError::Content(_))));
    }
}

#[test]
fn a_damaged_file_is_refused_by_name_and_never_panics() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("t.safetensors");
    trace(2, 6, 2, 8, 3).save(&path).expect("saves");
    let bytes = std::fs::read(&path).expect("reads");
    for cut in 0..bytes.len() {
        assert!(Trace::parse(&bytes[..cut]).is_err(), "cut at {cut}");
    }
    for at in 0..bytes.len() {
        for value in [0, 0xFF, bytes[at] ^ 1, bytes[at].wrapping_add(7)] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            // What is still a trace keeps every rule of one.
            if let Ok(read) = Trace::parse(&damaged) {
                let experts = read.header().experts;
                assert!(read.rows().flatten().all(|e| usize::from(*e) < experts));
            }
        }
    }
    let replaced = |from: &str, to: &str| {
        let start = bytes
            .windows(from.len())
            .position(|w| w == from.as_bytes())
            .expect("there");
        let mut out = bytes.clone();
        out[start..start + from.len()].copy_from_slice(to.as_bytes());
        out
    };
    for (from, to, why) in [
        ("horizon_trace", "horizon_track", "its header does not say so"),
        (r#"version\":1"#, r#"version\":7"#, "version 7"),
        (r#"top_k\":2"#, r#"top_k\":3"#, "tensor experts"),
        (r#"experts\":6"#, r#"experts\":3"#, "has no expert"),
        (r#""step":"#, r#""stop":"#, "no tensor step"),
        (r#""U16""#, r#""I16""#, "U16"),
    ] {
        std::fs::write(&path, replaced(from, to)).expect("writes");
        let error = Trace::load(&path).expect_err(why).to_string();
        assert!(error.contains(why) && error.contains("t.safetensors"), "{error}");
    }
    // The header's length, then the header, then the steps.
    let length = u64::from_le_bytes(*bytes.first_chunk().expect("a file"));
    let first_step = 8 + usize::try_from(length).expect("small");
    let mut gap = bytes;
    gap[first_step] = 5;
    assert!(
        Trace::parse(&gap)
            .expect_err("a step far away")
            .contains("count from 0")
    );
}

#[test]
fn traces_of_one_model_are_joined() {
    let (a, b) = (trace(3, 8, 2, 10, 4), trace(4, 8, 2, 7, 4));
    let mut both = a.clone();
    both.append(&b).expect("one model");
    assert_eq!(both.steps(), 17);
    assert!(both.rows().eq(a.rows().chain(b.rows())));
    let other = trace(4, 9, 2, 1, 1);
    assert!(both.append(&other).is_err());
}

/// Records that say whose they are.
struct Records(Vec<[u8; 2]>, usize);

impl Records {
    fn new(geometry: &Geometry) -> Self {
        let all = geometry.layers.len() * geometry.experts;
        let record = |i: usize| u16::try_from(i).expect("few").to_le_bytes();
        Self((0..all).map(record).collect(), geometry.experts)
    }
}

impl HostRecords for Records {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        &self.0[layer * self.1 + expert.index()]
    }
}

fn observed(o: Observation) -> u64 {
    match o {
        Observation::Observed(n) => n,
        other => panic!("{other:?}"),
    }
}

/// Runs a workload through the cache as a step does, and holds the replay to it after every group.
fn held_to_the_cache(workload: &Workload, policy: Policy, capacity: usize, spares: usize) {
    let geometry = Geometry {
        capacity,
        spares,
        ..workload.geometry().clone()
    };
    let slots = Arc::new(HostTransport::new(geometry.slots(), 2, 2).expect("memory"));
    let records = Arc::new(Records::new(&geometry));
    let cache = ResidentV1::new(geometry.clone(), policy, records, slots).expect("sets up");
    let mut replay = PolicyReplay::new(geometry.clone(), policy);
    let what = format!("{policy}, capacity {capacity}, {spares} spares");
    let mut hold = cache.capture();
    for group in workload.groups() {
        if group.layer == 0 {
            let old = std::mem::replace(&mut hold, cache.capture());
            cache.release(old, Completion::DONE);
        }
        let layer = geometry.layers[group.layer];
        let whole = RoutedGroup {
            layer,
            experts: group.experts,
        };
        for wave in cache.waves(&hold, &whole) {
            let wave = RoutedGroup {
                layer,
                experts: &wave,
            };
            drop(
                cache
                    .acquire(&mut hold, &wave, Completion::DONE)
                    .expect("acquires"),
            );
        }
        replay.acquire(group.layer, group.experts);
        let map = &cache.census().0[group.layer];
        for (e, slot) in (0u32..).map(ExpertId).zip(map) {
            assert_eq!(
                replay.is_resident(group.layer, e),
                slot.is_some(),
                "{e} of layer {} after step {}: {what}",
                group.layer,
                group.step
            );
        }
    }
    let counts = simulate(workload, Contender::Policy(policy), capacity, spares).expect("replays");
    let observations = cache.observations();
    assert_eq!(counts.total().hits, observed(observations.total.hits), "{what}");
    assert_eq!(
        counts.total().misses,
        observed(observations.total.misses),
        "{what}"
    );
    for (tally, layer) in counts.layers.iter().zip(&observations.layers) {
        assert_eq!(tally.misses, observed(layer.counts.misses), "{what}");
    }
    assert_eq!(counts.bytes, counts.total().misses * 100);
}

#[test]
fn a_replay_evicts_what_the_cache_evicts() {
    for (seed, experts, top_k) in [(5, 9, 2), (6, 16, 4), (7, 5, 5), (8, 12, 1)] {
        let workload = Workload::new(&trace(seed, experts, top_k, 60, 12));
        for policy in Policy::ALL {
            for capacity in top_k..=experts {
                for spares in [top_k, top_k + 2] {
                    held_to_the_cache(&workload, policy, capacity, spares);
                }
            }
        }
    }
}

#[test]
fn sizes_that_the_cache_refuses_are_refused() {
    let workload = Workload::new(&trace(9, 6, 2, 3, 2));
    for (capacity, spares) in [(1, 2), (7, 2), (3, 1)] {
        for contender in Contender::all() {
            assert!(
                simulate(&workload, contender, capacity, spares).is_err(),
                "{capacity}, {spares}"
            );
        }
    }
    for contender in Contender::all() {
        assert_eq!(contender.name().parse(), Ok(contender));
    }
    assert!(
        "best"
            .parse::<Contender>()
            .expect_err("no such")
            .contains("lfu-aging, optimum")
    );
}

/// The fewest misses of one layer by trying every choice of residents, as sets of bits. `limit`: the largest group that
/// must be resident at once.
fn fewest_misses(groups: &[u32], experts: u32, capacity: u32, limit: u32) -> u32 {
    let mut cost = BTreeMap::from([((1u32 << capacity) - 1, 0u32)]);
    for group in groups {
        let mut after: BTreeMap<u32, u32> = BTreeMap::new();
        let forced = if group.count_ones() <= limit { *group } else { 0 };
        for (resident, so_far) in &cost {
            let missed = so_far + (group & !resident).count_ones();
            for next in 0..1u32 << experts {
                let possible = next.count_ones() == capacity
                    && next & !(resident | group) == 0
                    && forced & !next == 0
                    // Nothing is evicted for a group that is there.
                    && (group & !resident != 0 || next == *resident);
                if possible {
                    let best = after.entry(next).or_insert(u32::MAX);
                    *best = missed.min(*best);
                }
            }
        }
        cost = after;
    }
    cost.into_values().min().expect("some choice is always possible")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn no_policy_beats_the_optimum(
        seed in any::<u64>(), experts in 2usize..14, k in 1usize..5, steps in 1usize..60, most in 1usize..8,
    ) {
        let top_k = k.min(experts);
        let workload = Workload::new(&trace(seed, experts, top_k, steps, most));
        for capacity in top_k..=experts {
            for spares in [top_k, experts] {
                let bound = simulate(&workload, Contender::Optimum, capacity, spares).expect("replays");
                for policy in Policy::ALL {
                    let counts = simulate(&workload, Contender::Policy(policy), capacity, spares).expect("replays");
                    prop_assert_eq!(counts.total().requests(), workload.requests() as u64);
                    prop_assert_eq!(bound.total().requests(), workload.requests() as u64);
                    for (theirs, bound) in counts.layers.iter().zip(&bound.layers) {
                        prop_assert!(bound.misses <= theirs.misses, "{} at {}", policy, capacity);
                    }
                }
            }
        }
    }

    #[test]
    fn the_optimum_is_the_best_of_all_choices(
        seed in any::<u64>(), experts in 2usize..6, k in 1usize..4, steps in 1usize..9, most in 1usize..4,
    ) {
        let top_k = k.min(experts);
        let workload = Workload::new(&trace(seed, experts, top_k, steps, most));
        for capacity in top_k..=experts {
            for spares in [top_k, experts] {
                let bound = simulate(&workload, Contender::Optimum, capacity, spares).expect("replays");
                for layer in 0..LAYERS.len() {
                    let groups: Vec<u32> = workload
                        .groups()
                        .filter(|g| g.layer == layer)
                        .map(|g| g.experts.iter().fold(0, |bits, e| bits | 1 << e.0))
                        .collect();
                    let small = |n: usize| u32::try_from(n).expect("small");
                    let best = fewest_misses(&groups, small(experts), small(capacity), small(capacity.min(spares)));
                    prop_assert_eq!(bound.layers[layer].misses, u64::from(best));
                }
            }
        }
    }
}

#[test]
fn a_workload_has_each_group_once() {
    let trace = trace(11, 7, 2, 5, 4);
    let workload = Workload::new(&trace);
    let mut rows = trace.rows();
    for groups in workload.groups().collect::<Vec<_>>().chunks(2) {
        let step = rows.next().expect("as many steps");
        for (layer, group) in groups.iter().enumerate() {
            let want: BTreeSet<u32> = step
                .chunks(4)
                .flat_map(|row| row[layer * 2..layer * 2 + 2].iter().map(|e| u32::from(*e)))
                .collect();
            assert!(group.experts.iter().map(|e| e.0).eq(want));
            assert_eq!((group.layer, group.rows), (layer, step.len() / 4));
        }
    }
    assert!(rows.next().is_none());
}
