//! Synthetic checkpoints: the golden recipes give the recorded bytes; full shapes are sound and reproducible.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use horizon_core::artifact::writer::UNFINISHED_MARKER;
use horizon_core::artifact::{Progress, Silent};
use horizon_core::roles::{dense_tensors, expert_tensors};
use horizon_core::synthetic::{
    Recipe, Shape, ShapeFamily, SyntheticError, SyntheticSpec, write_checkpoint, write_recipe,
};
use safetensors::SafeTensors;
use sha2::{Digest as _, Sha256};

fn sha256(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn files(dir: &Path) -> BTreeMap<String, String> {
    std::fs::read_dir(dir)
        .expect("a directory")
        .map(|e| e.expect("an entry"))
        .map(|e| {
            (
                e.file_name().into_string().expect("plain names"),
                sha256(&e.path()),
            )
        })
        .collect()
}

#[test]
fn every_golden_recipe_gives_the_recorded_bytes() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/fixtures/goldens");
    let mut models = 0;
    for entry in std::fs::read_dir(&goldens).expect("the goldens are part of the project") {
        let model = entry.expect("an entry").path();
        if !model.is_dir() {
            continue;
        }
        let text = std::fs::read_to_string(model.join("tensors.tsv")).expect("a recipe");
        let index = std::fs::read_to_string(model.join("index.json")).expect("an index");
        let index: serde_json::Value = serde_json::from_str(&index).expect("JSON");
        let want: BTreeMap<String, String> =
            serde_json::from_value(index["checkpoint_sha256"].clone()).expect("digests");
        let out = tempfile::tempdir().expect("a temporary directory");
        write_recipe(out.path(), &Recipe::parse(&text).expect("well formed"), &Silent).expect("written");
        assert_eq!(files(out.path()), want, "{}", model.display());
        models += 1;
    }
    assert_eq!(models, 8);
}

#[derive(Default)]
struct Counted {
    announced: AtomicU64,
    done: AtomicU64,
}

impl Progress for Counted {
    fn begin(&self, _: &str, bytes: u64) {
        self.announced.fetch_add(bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn note(&self, text: &str) {
        panic!("nothing to note: {text}");
    }
}

fn small(name: &str) -> Shape {
    let mut shape = Shape::named(name).expect("a known name");
    shape.layers = 2;
    shape.hidden = 64;
    shape.heads = 4;
    shape.kv_heads = 2;
    shape.head_dim = shape.head_dim.map(|_| 24);
    shape.experts = 5;
    shape.top_k = 2;
    shape.width = 40;
    shape.shared_width = shape.shared_width.min(48);
    shape.vocab = 300;
    shape
}

#[test]
fn a_checkpoint_holds_what_its_specification_asks_for() {
    for name in Shape::NAMES {
        let out = tempfile::tempdir().expect("a temporary directory");
        let dir = out.path().join("model");
        let mut spec = SyntheticSpec::new(small(name), 3);
        spec.shard_bytes = 60_000;
        let reported = Counted::default();
        let summary = write_checkpoint(&dir, &spec, &reported).expect("written");
        assert_eq!(reported.announced.into_inner(), summary.data_bytes, "{name}");
        assert_eq!(reported.done.into_inner(), summary.data_bytes, "{name}");
        let model = spec.shape.model_spec().expect("valid");
        assert_eq!(
            summary.tensors,
            dense_tensors(&model).len() + expert_tensors(&model).count(),
            "{name}"
        );
        assert!(summary.files > 1);

        let json = |file: &str| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join(file)).expect("a file")).expect("JSON")
        };
        assert_eq!(
            json("config.json")["_name_or_path"],
            format!("{name}-shape synthetic seed 3")
        );
        let map = json("model.safetensors.index.json")["weight_map"].clone();
        let (mut seen, mut elements) = (0, 0);
        for file in files(&dir).keys().filter(|f| f.ends_with(".safetensors")) {
            let bytes = std::fs::read(dir.join(file)).expect("a shard");
            for (tensor, view) in SafeTensors::deserialize(&bytes).expect("a valid file").tensors() {
                assert_eq!(map[&tensor], **file, "{tensor}");
                elements += view.shape().iter().product::<usize>();
                seen += 1;
            }
        }
        assert_eq!(seen, summary.tensors, "{name}");
        assert_eq!(elements as u64 * 2, summary.data_bytes, "{name}");
        assert_eq!(
            std::fs::read_dir(out.path()).expect("a directory").count(),
            1,
            "{name}: leftovers"
        );
    }
}

#[test]
fn the_bytes_depend_on_shape_and_seed_alone() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let write = |dir: &str, seed, threads| -> (PathBuf, BTreeMap<String, String>) {
        let path = out.path().join(dir);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        let spec = SyntheticSpec::new(small("olmoe"), seed);
        pool.install(|| write_checkpoint(&path, &spec, &Silent))
            .expect("written");
        let listing = files(&path);
        (path, listing)
    };
    let (path, one) = write("a", 1, 1);
    assert_eq!(one, write("b", 1, 3).1);
    assert_ne!(one["model.safetensors"], write("c", 2, 3).1["model.safetensors"]);
    let again = write_checkpoint(&path, &SyntheticSpec::new(small("olmoe"), 9), &Silent);
    assert!(matches!(again, Err(SyntheticError::Exists { .. })), "{again:?}");
    assert_eq!(files(&path), one, "an existing directory is left as it was");
}

#[test]
fn impossible_requests_are_refused_and_leave_nothing() {
    assert!(matches!(
        Shape::named("gpt-2"),
        Err(SyntheticError::UnknownShape { .. })
    ));
    type Break = fn(&mut Shape);
    let cases: [(&str, Break); 7] = [
        ("num_experts", |s| s.experts = 0),
        ("num_experts_per_tok", |s| s.top_k = 6),
        ("vocab_size", |s| s.vocab = 100),
        ("num_attention_heads", |s| s.heads = 3),
        ("shared_expert_intermediate_size", |s| s.shared_width = 8),
        ("head_dim", |s| s.head_dim = Some(32)),
        ("num_hidden_layers", |s| s.layers = usize::MAX),
    ];
    let out = tempfile::tempdir().expect("a temporary directory");
    for (field, mutate) in cases {
        let mut shape = small("olmoe");
        assert_eq!(shape.family, ShapeFamily::Olmoe);
        mutate(&mut shape);
        match write_checkpoint(&out.path().join("m"), &SyntheticSpec::new(shape, 1), &Silent) {
            Err(SyntheticError::Shape { source, .. }) => assert_eq!(source.field, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    // What a killed run leaves is removed by the next one, and nothing else is.
    let partial = out.path().join("m.partial");
    std::fs::create_dir(&partial).expect("a directory");
    std::fs::write(partial.join("model.safetensors"), "half").expect("written");
    let spec = SyntheticSpec::new(small("olmoe"), 1);
    let foreign = write_checkpoint(&out.path().join("m"), &spec, &Silent);
    assert!(matches!(foreign, Err(SyntheticError::Write(_))), "{foreign:?}");
    std::fs::write(partial.join(UNFINISHED_MARKER), "").expect("written");
    write_checkpoint(&out.path().join("m"), &spec, &Silent).expect("written");
    assert_eq!(std::fs::read_dir(out.path()).expect("a directory").count(), 1);
    std::fs::remove_dir_all(out.path().join("m")).expect("removed");

    let missing = write_checkpoint(&out.path().join("no/such/parent"), &spec, &Silent);
    assert!(
        matches!(missing, Err(SyntheticError::Write { .. })),
        "{missing:?}"
    );
    assert_eq!(std::fs::read_dir(out.path()).expect("a directory").count(), 0);
}
