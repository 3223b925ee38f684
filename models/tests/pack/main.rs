//! Checkpoint to artifact to memory: the same model on every way, and nothing else on any.

mod notes;
mod refused;
mod support;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;
use horizon_core::artifact::{Check, Progress, Silent, verify};
use horizon_core::dense::{DenseFormat, conversion_bytes};
use horizon_core::dtype::{DType, NarrowingReport};
use horizon_core::ids::ExpertId;
use horizon_core::image::ExpertImage;
use horizon_core::provider::SlotMemory;
use horizon_core::qpacked::{self, BlockSize, QpackedLayout, Quantizer, dequantize};
use horizon_core::record::{Canonical, ExpertEncoding};
use horizon_core::roles::{ExpertMatrix, ExpertRole, dense_tensors};
use horizon_models::pack::{PackError, PackOptions, PackReport, pack};
use horizon_models::source::{ExpertsMode, HostBytes, LoadOptions, LoadedModel, ModelSource, SourceKind};
use safetensors::Dtype;
use support::{Tiny, Told, files_in, scene};

fn packed(hub: &Path, dest: &Path, options: &PackOptions) -> Result<PackReport, PackError> {
    let source = ModelSource::open(hub).expect("a sound checkpoint");
    pack(&source, dest, options, &Silent, &AtomicBool::new(false))
}

fn load(path: &Path, experts: ExpertsMode) -> LoadedModel {
    load_as(path, experts, DenseFormat::F16)
}

fn load_as(path: &Path, experts: ExpertsMode, dense: DenseFormat) -> LoadedModel {
    let options = LoadOptions {
        experts,
        dense,
        check: Check::Sha256,
    };
    ModelSource::open(path)
        .expect("sound")
        .load(&options, &Canonical, &Silent)
        .expect("loads")
}

fn settings(block: BlockSize, quantizer: Quantizer) -> ExpertsMode {
    ExpertsMode::Qpacked {
        block: Some(block),
        quantizer: Some(quantizer),
    }
}

fn records(image: &ExpertImage, model: &LoadedModel) -> Vec<Vec<u8>> {
    let experts = u32::try_from(model.spec.moe().expect("experts").experts).expect("few");
    model
        .spec
        .moe_layers()
        .flat_map(|l| (0..experts).map(move |e| image.address(l, ExpertId(e)).expect("every expert")))
        .map(|address| image.record(address).to_vec())
        .collect()
}

/// The same weights, bit for bit, however they came.
fn assert_same(a: &LoadedModel, b: &LoadedModel) {
    assert_eq!(a.spec, b.spec);
    for (role, shape) in dense_tensors(&a.spec) {
        let (x, y) = (
            a.dense.get(role).expect("loaded"),
            b.dense.get(role).expect("loaded"),
        );
        assert_eq!(x.len(), shape.iter().product::<usize>());
        assert!(
            x.iter().map(|v| v.to_bits()).eq(y.iter().map(|v| v.to_bits())),
            "{role:?}"
        );
    }
    let [x, y] = [a, b].map(|m| records(m.image.as_ref().expect("experts"), m));
    assert_eq!(x, y);
    assert_eq!(a.encoding, b.encoding);
    assert_eq!(a.narrowing, b.narrowing);
    assert_eq!(a.quantization_error, b.quantization_error);
}

#[test]
fn an_artifact_and_its_checkpoint_load_to_the_same_bits() {
    for tiny in [Tiny::olmoe(), Tiny::qwen2()] {
        let (_dir, hub, dest) = scene(&tiny, Dtype::BF16, 2);
        for block in BlockSize::ALL {
            for quantizer in [Quantizer::Absmax, Quantizer::Mse] {
                let options = PackOptions {
                    block,
                    quantizer,
                    force: true,
                    threads: None,
                };
                let report = packed(&hub, &dest, &options).expect("packs");
                let from_artifact = load(&dest, ExpertsMode::default());
                let from_checkpoint = load(&hub, settings(block, quantizer));
                assert_same(&from_artifact, &from_checkpoint);
                assert_eq!(from_artifact.quantization_error, report.quantization_error);
                assert_eq!(from_artifact.dtypes, from_checkpoint.dtypes);
                assert!(
                    from_checkpoint.notes[0].contains("horizon pack"),
                    "{:?}",
                    from_checkpoint.notes
                );
            }
        }
        let summary = verify(&dest, &Silent).expect("sound");
        assert_eq!(
            summary.manifest_sha256,
            ModelSource::open(&dest).expect("sound").identity()
        );
    }
}

#[test]
fn packed_experts_are_the_quantizer_s_and_dense_weights_the_checkpoint_s() {
    let tiny = Tiny::olmoe();
    let (_dir, hub, dest) = scene(&tiny, Dtype::F32, 1);
    let options = PackOptions {
        block: BlockSize::B32,
        quantizer: Quantizer::Absmax,
        ..PackOptions::default()
    };
    packed(&hub, &dest, &options).expect("packs");
    let source = ModelSource::open(&dest).expect("sound");
    let model = load(&dest, ExpertsMode::default());
    for (role, _) in dense_tensors(&model.spec) {
        let (_, values) = &tiny.tensors[&source.names().dense(role)];
        let loaded = model.dense.get(role).expect("loaded");
        assert!(
            loaded.iter().map(|v| v.to_f32()).eq(values.iter().copied()),
            "{role:?}"
        );
    }
    let (image, layout) = (
        model.image.as_ref().expect("experts"),
        model.layout.as_ref().expect("experts"),
    );
    let mut squared = vec![(0.0, 0.0); 2];
    for layer in model.spec.moe_layers() {
        for expert in (0..3).map(ExpertId) {
            let record = image.record(image.address(layer, expert).expect("every expert"));
            for matrix in ExpertMatrix::ALL {
                let (shape, values) = &tiny.tensors[&source.names().expert(ExpertRole {
                    layer,
                    expert,
                    matrix,
                })];
                let q = QpackedLayout {
                    rows: shape[0],
                    cols: shape[1],
                    block: BlockSize::B32,
                };
                let (mut codes, mut scales) = (vec![0; q.code_bytes()], vec![f16::ZERO; q.scales()]);
                qpacked::quantize("t", values, &q, Quantizer::Absmax, &mut codes, &mut scales)
                    .expect("finite");
                let m = layout.matrix(matrix);
                assert_eq!(&record[m.values.clone()], codes);
                assert!(
                    record[m.scales.clone()]
                        .chunks(2)
                        .eq(scales.iter().map(|s| s.to_le_bytes()))
                );
                let mut back = vec![0.0; values.len()];
                dequantize(&q, &codes, &scales, &mut back);
                for (w, b) in values.iter().zip(back) {
                    squared[layer.index()].0 += f64::from(w - b).powi(2);
                    squared[layer.index()].1 += f64::from(*w).powi(2);
                }
            }
        }
    }
    for (reported, (error, norm)) in model.quantization_error.iter().zip(squared) {
        assert!(
            (reported.squared_error / error - 1.0).abs() < 1e-6,
            "{reported:?} {error}"
        );
        assert!(
            (reported.squared_norm / norm - 1.0).abs() < 1e-9,
            "{reported:?} {norm}"
        );
        assert!(reported.relative_rmse() > 0.01);
    }
}

#[test]
fn equal_values_give_equal_tensors_in_every_type_and_any_number_of_files() {
    let tiny = Tiny::qwen2();
    let mut digests = Vec::new();
    for (dtype, shards) in [
        (Dtype::BF16, 1),
        (Dtype::F16, 1),
        (Dtype::F32, 1),
        (Dtype::BF16, 3),
        (Dtype::F32, 2),
    ] {
        let (_dir, hub, dest) = scene(&tiny, dtype, shards);
        packed(&hub, &dest, &PackOptions::default()).expect("packs");
        let source = ModelSource::open(&dest).expect("sound");
        let manifest = source.artifact().expect("an artifact").manifest().clone();
        let name = format!("{dtype:?}");
        assert_eq!(
            manifest
                .dtypes
                .checkpoint
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            [name]
        );
        assert_eq!(manifest.dtypes.quantized_source, manifest.dtypes.checkpoint);
        assert_eq!(manifest.dtypes.scale, DType::F16);
        assert_eq!(manifest.source.files.len(), shards);
        digests.push(manifest.shards);
    }
    assert!(digests.windows(2).all(|w| w[0] == w[1]));
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let (_dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 2);
    let with = |threads| {
        let options = PackOptions {
            force: true,
            threads,
            ..PackOptions::default()
        };
        let told = Told::default();
        let source = ModelSource::open(&hub).expect("sound");
        let report = pack(&source, &dest, &options, &told, &AtomicBool::new(false)).expect("packs");
        assert_eq!(*told.total.lock().expect("no panic"), report.bytes_read);
        assert_eq!(*told.done.lock().expect("no panic"), report.bytes_read);
        files_in(&dest)
    };
    let one = with(Some(1));
    for threads in [Some(2), Some(7), None] {
        assert_eq!(one, with(threads), "{threads:?} threads");
    }
    let shards = one.keys().filter(|n| n.ends_with(".safetensors")).count();
    assert_eq!(shards, 3, "the non-routed tensors, and each layer's experts");
    for name in [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        assert_eq!(one[name], fs::read(hub.join(name)).expect("readable"), "{name}");
    }
}

#[test]
fn the_control_arm_holds_the_checkpoint_s_experts_in_fp16() {
    let tiny = Tiny::olmoe();
    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 1);
    let source = ModelSource::open(&hub).expect("sound");
    let model = load(&hub, ExpertsMode::F16);
    let layout = model.layout.as_ref().expect("experts");
    assert_eq!((layout.encoding, model.quantizer), (ExpertEncoding::F16, None));
    assert!(model.quantization_error.is_empty() && model.dtypes.quantized_source.is_empty());
    let image = model.image.as_ref().expect("experts");
    for layer in model.spec.moe_layers() {
        for matrix in ExpertMatrix::ALL {
            let expert = ExpertId(1);
            let (_, values) = &tiny.tensors[&source.names().expert(ExpertRole {
                layer,
                expert,
                matrix,
            })];
            let record = image.record(image.address(layer, expert).expect("every expert"));
            let stored = record[layout.matrix(matrix).values.clone()].as_chunks::<2>().0;
            assert!(
                stored
                    .iter()
                    .map(|b| f16::from_le_bytes(*b).to_f32())
                    .eq(values.iter().copied())
            );
        }
    }
    let all: usize = tiny.tensors.values().map(|(_, v)| v.len()).sum();
    assert_eq!(
        model.narrowing,
        NarrowingReport {
            values: all as u64,
            inexact: 0
        }
    );
}

#[test]
fn lost_bits_are_counted_and_told() {
    let mut tiny = Tiny::olmoe();
    for i in 0..5 {
        tiny.set("model.norm.weight", i, 2f32.powi(-26) * 3.0);
    }
    let (_dir, hub, dest) = scene(&tiny, Dtype::F32, 1);
    let report = packed(&hub, &dest, &PackOptions::default()).expect("packs");
    assert_eq!(report.narrowing.inexact, 5);
    let model = load(&dest, ExpertsMode::default());
    assert_eq!(model.narrowing, report.narrowing);
    assert!(
        model.details.iter().any(|n| n.contains("5 of")),
        "{:?}",
        model.details
    );
}

#[test]
fn a_model_in_memory_is_the_model_on_disk() {
    let tiny = Tiny::qwen2();
    let (_dir, hub, dest) = scene(&tiny, Dtype::BF16, 1);
    let weights = tiny.weights(Dtype::BF16, |_| true);
    let source = ModelSource::in_memory("the demo model", tiny.files(), weights).expect("sound");
    assert_eq!(source.kind(), SourceKind::Memory);
    assert_eq!(
        source.identity(),
        ModelSource::open(&hub).expect("sound").identity()
    );
    assert_eq!(
        source.file("tokenizer.json").expect("no error"),
        Some(tiny.files()["tokenizer.json"].clone())
    );
    assert_eq!(source.file("merges.txt").expect("no error"), None);
    let model = source
        .load(&LoadOptions::default(), &Canonical, &Silent)
        .expect("loads");
    assert_same(&model, &load(&hub, ExpertsMode::default()));
    assert_eq!(model.notes, Vec::<String>::new());
    pack(
        &source,
        &dest,
        &PackOptions::default(),
        &Silent,
        &AtomicBool::new(false),
    )
    .expect("packs");
    assert_same(&model, &load(&dest, ExpertsMode::default()));
}

#[test]
#[cfg(target_os = "linux")]
fn once_loaded_nothing_refers_to_the_files() {
    let (dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 2);
    packed(&hub, &dest, &PackOptions::default()).expect("packs");
    for path in [&hub, &dest] {
        let source = ModelSource::open(path).expect("sound");
        let model = source
            .load(&LoadOptions::default(), &Canonical, &Silent)
            .expect("loads");
        let inside = |text: &str| text.contains(dir.path().to_str().expect("UTF-8"));
        let open = fs::read_dir("/proc/self/fd").expect("readable").flatten();
        let links = open
            .filter_map(|e| fs::read_link(e.path()).ok())
            .map(|l| l.display().to_string());
        assert_eq!(links.filter(|l| inside(l)).count(), 0);
        assert!(!inside(&fs::read_to_string("/proc/self/maps").expect("readable")));
        drop(model);
    }
}

#[test]
fn the_predicted_bytes_are_those_that_are_held() {
    for tiny in [Tiny::olmoe(), Tiny::qwen2()] {
        let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 1);
        for (experts, dense) in [
            (ExpertsMode::F16, DenseFormat::F16),
            (ExpertsMode::default(), DenseFormat::F16),
            (ExpertsMode::default(), DenseFormat::Q8),
        ] {
            let model = load_as(&hub, experts, dense);
            let bytes = HostBytes::predict(&model.spec, model.encoding, dense, &Canonical, 3);
            assert_eq!(bytes.dense, model.dense.bytes() as u64);
            assert_eq!(
                bytes.experts,
                model.image.as_ref().expect("experts").bytes() as u64
            );
            // Tensors on their way to q8 and then records, not both at once.
            let records = 3 * model.layout.as_ref().expect("experts").bytes;
            let scratch = records.max(conversion_bytes(&model.spec, dense, 3));
            assert_eq!(bytes.scratch, scratch as u64);
            assert_eq!(bytes.resident(), bytes.dense + bytes.experts);
        }
    }
}

/// Stops the work once so many bytes are done.
struct StopAfter<'a>(&'a AtomicBool, Told);

impl Progress for StopAfter<'_> {
    fn begin(&self, what: &str, bytes: u64) {
        self.1.begin(what, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.1.advance(bytes);
        let (done, total) = (
            *self.1.done.lock().expect("no panic"),
            *self.1.total.lock().expect("no panic"),
        );
        self.0.fetch_or(done > total / 3, Ordering::Relaxed);
    }

    fn note(&self, text: &str) {
        self.1.note(text);
    }
}

#[test]
fn a_cancelled_run_leaves_everything_as_it_was() {
    let (dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 1);
    let source = ModelSource::open(&hub).expect("sound");
    let options = PackOptions {
        force: true,
        threads: Some(2),
        ..PackOptions::default()
    };
    let stopped = || {
        let cancel = AtomicBool::new(false);
        let progress = StopAfter(&cancel, Told::default());
        let result = pack(&source, &dest, &options, &progress, &cancel);
        assert!(matches!(result, Err(PackError::Cancelled)), "{result:?}");
    };
    stopped();
    assert_eq!(
        fs::read_dir(dir.path()).expect("readable").count(),
        1,
        "only the checkpoint"
    );
    packed(&hub, &dest, &options).expect("packs");
    let before = files_in(&dest);
    stopped();
    assert_eq!(files_in(&dest), before);
    assert_eq!(
        fs::read_dir(dir.path()).expect("readable").count(),
        2,
        "the checkpoint and the artifact"
    );
}
