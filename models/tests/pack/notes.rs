//! What users are told beside the result: once, and only what is news.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use horizon_core::artifact::Progress;
use horizon_core::artifact::writer::UNFINISHED_MARKER;
use horizon_core::record::Canonical;
use horizon_models::pack::{PackOptions, pack};
use horizon_models::source::{ExpertsMode, LoadOptions, ModelSource};
use safetensors::Dtype;

use super::support::{Tiny, Told, scene};
use super::{load, packed};

#[test]
fn what_nobody_reads_and_what_was_left_is_told_once() {
    let mut tiny = Tiny::olmoe();
    for name in [
        "q_proj.bias",
        "k_proj.bias",
        "v_proj.bias",
        "o_proj.bias",
        "q_proj.zeros",
        "rotary_emb.inv_freq",
    ] {
        let name = format!("model.layers.0.self_attn.{name}");
        tiny.tensors.insert(name, (vec![4], vec![0.5; 4]));
    }
    tiny.config["router_temperature"] = 0.5.into();
    tiny.config["rope_parameters"] = serde_json::json!({"rope_type": "default", "beta_fast": 32});
    let (dir, hub, dest) = scene(&tiny, Dtype::F32, 1);
    let partial = dir.path().join("m.hz.partial");
    fs::create_dir(&partial).expect("a new folder");
    fs::write(partial.join(UNFINISHED_MARKER), "").expect("writes");
    let source = ModelSource::open(&hub).expect("sound");
    let told = Told::default();
    let report = pack(
        &source,
        &dest,
        &PackOptions::default(),
        &told,
        &AtomicBool::new(false),
    )
    .expect("packs");
    let told = told.notes.into_inner().expect("no panic");
    assert_eq!(report.notes, told);
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(
        told[0].contains("model_type olmoe: router_temperature, rope_parameters.beta_fast;"),
        "{told:?}"
    );
    // The frequencies that old checkpoints store are no news.
    assert!(
        told[1].contains(": 5 of ")
            && told[1].ends_with(
                "o_proj.bias, model.layers.0.self_attn.q_proj.bias, \
        model.layers.0.self_attn.q_proj.zeros and 1 more"
            ),
        "{told:?}"
    );
    assert!(told[2].contains("did not finish"), "{told:?}");
    // A load tells what concerns the model; the tensors of an artifact are its own.
    assert_eq!(load(&hub, ExpertsMode::F16).notes, told[..2]);
    assert_eq!(load(&dest, ExpertsMode::default()).notes, told[..1]);
}

#[test]
fn a_sound_checkpoint_has_no_notes() {
    for mut tiny in [Tiny::olmoe(), Tiny::qwen2()] {
        // Some checkpoints store a tied head again.
        if tiny.config["tie_word_embeddings"] == true {
            let table = tiny.tensors["model.embed_tokens.weight"].clone();
            tiny.tensors.insert("lm_head.weight".into(), table);
        }
        let (_dir, hub, dest) = scene(&tiny, Dtype::BF16, 2);
        assert!(
            packed(&hub, &dest, &PackOptions::default())
                .expect("packs")
                .notes
                .is_empty()
        );
        assert!(load(&hub, ExpertsMode::F16).notes.is_empty());
        assert!(load(&dest, ExpertsMode::default()).notes.is_empty());
    }
}

/// Wants no more once anything has been read.
#[derive(Default)]
struct Impatient(AtomicBool, Told);

impl Progress for Impatient {
    fn begin(&self, what: &str, bytes: u64) {
        self.1.begin(what, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.1.advance(bytes);
        self.0.store(true, Ordering::SeqCst);
    }

    fn note(&self, text: &str) {
        self.1.note(text);
    }

    fn stopped(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_load_that_is_not_wanted_any_more_ends_soon() {
    let (_dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 1);
    packed(&hub, &dest, &PackOptions::default()).expect("packs");
    for (path, experts) in [
        (&hub, ExpertsMode::F16),
        (&hub, ExpertsMode::default()),
        (&dest, ExpertsMode::default()),
    ] {
        let (progress, options) = (
            Impatient::default(),
            LoadOptions {
                experts,
                ..LoadOptions::default()
            },
        );
        let source = ModelSource::open(path).expect("sound");
        let error = source.load(&options, &Canonical, &progress).expect_err("stopped");
        assert!(error.to_string().contains("stopped"), "{error}");
        let [done, total] = [&progress.1.done, &progress.1.total].map(|n| *n.lock().expect("no panic"));
        assert!(done > 0 && done < total, "{done} of {total} bytes");
    }
}
