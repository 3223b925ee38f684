//! The fast CPU backend against the scalar reference: the same bits on every instruction set, for any number of
//! threads, and however a sequence is cut into steps.

use std::num::NonZeroUsize;
use std::sync::Arc;

use horizon_core::backend::{
    Activations, Backend, CompiledModel, Regime, StepBatch, StepError, StepOutput, StepRow,
};
use horizon_core::cpu::simd::Isa;
use horizon_core::cpu::{FastCpu, ReferenceCpu};
use horizon_core::dense::{DenseFormat, DenseStore};
use horizon_core::ids::LayerId;
use horizon_core::image::{ExpertImage, NoExperts};
use horizon_core::provider::{ExpertProvider, FullyResident};
use horizon_core::qpacked::BlockSize;
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm, SharedExpertSpec,
};
use horizon_core::stage::{Stage, TapData};
use horizon_core::synthetic::RandomWeights;

fn attention(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        output_bias: false,
        clip_qkv: None,
        rope_theta: 1e4,
    }
}

fn model(hidden: usize, attention: AttentionSpec, moe: MoeSpec) -> ModelSpec {
    let moe = LayerSpec {
        window: None,
        feed_forward: FeedForward::Moe(moe),
    };
    ModelSpec {
        family: "test".into(),
        vocab: 203,
        hidden,
        context: 64,
        rms_norm_eps: 1e-5,
        tied_embeddings: false,
        attention,
        layers: vec![moe; 2],
    }
}

/// Hazards: widths that end inside a group of 128 and inside sixteen lanes, grouped heads, every norm and bias,
/// windows, dense layers, an expert nobody uses, all experts used, one expert.
fn cases() -> Vec<(&'static str, ModelSpec)> {
    let moe = |experts, top_k, width| MoeSpec {
        experts,
        top_k,
        width,
        renormalize: false,
        shared: None,
    };
    let plain = model(64, attention(4, 4, 16), moe(8, 2, 72));
    let mut all = model(
        136,
        attention(4, 2, 24),
        MoeSpec {
            renormalize: true,
            ..moe(4, 4, 200)
        },
    );
    all.attention.qk_norm = QkNorm::PerHead;
    all.attention.output_bias = true;
    let mut shared = model(128, attention(4, 1, 32), moe(6, 4, 352));
    shared.attention.qkv_bias = true;
    shared.tied_embeddings = true;
    for (gated, l) in [true, false].into_iter().zip(&mut shared.layers) {
        let FeedForward::Moe(m) = &mut l.feed_forward else {
            unreachable!("built as MoE")
        };
        m.shared = Some(SharedExpertSpec {
            width: 88,
            gated: true,
        });
        l.window = gated.then_some(5);
    }
    shared.layers.insert(
        0,
        LayerSpec {
            window: None,
            feed_forward: FeedForward::Dense { width: 104 },
        },
    );
    let mut clipped = model(256, attention(2, 2, 64), moe(16, 1, 128));
    clipped.attention.qk_norm = QkNorm::AllHeads;
    clipped.attention.clip_qkv = Some(0.8);
    let one = model(72, attention(3, 3, 8), moe(1, 1, 8));
    vec![
        ("plain", plain),
        ("all experts", all),
        ("shared", shared),
        ("clipped", clipped),
        ("one expert", one),
    ]
}

struct Opened {
    model: Box<dyn CompiledModel>,
    provider: Arc<dyn ExpertProvider>,
}

fn open(
    spec: &ModelSpec,
    encoding: ExpertEncoding,
    activations: Activations,
    isa: Option<(Isa, usize)>,
) -> Opened {
    open_with(spec, encoding, activations, isa, false, DenseFormat::F16)
}

fn open_with(
    spec: &ModelSpec,
    encoding: ExpertEncoding,
    activations: Activations,
    isa: Option<(Isa, usize)>,
    integers: bool,
    format: DenseFormat,
) -> Opened {
    spec.validate().expect("a sound case");
    let random = RandomWeights(42);
    let layout = RecordLayout::new(spec, encoding).expect("every case has experts");
    let tiling: &dyn RecordTiling = if isa.is_some() {
        FastCpu::tiling()
    } else {
        ReferenceCpu::tiling()
    };
    let image = Arc::new(ExpertImage::load(spec, &layout, tiling, &random).expect("loads"));
    let backend: Box<dyn Backend> = match isa {
        None => Box::new(ReferenceCpu::new(image.clone(), encoding)),
        Some((isa, threads)) => {
            let fast = FastCpu::with_isa(isa, NonZeroUsize::new(threads), image.clone(), encoding);
            Box::new(fast.expect("threads").with_integers(integers))
        }
    };
    let regime = Regime {
        activations,
        context: 40,
        sequences: 2,
        max_rows: 16,
    };
    let plan = backend.plan(spec, &regime).expect("plans");
    let dense = Arc::new(DenseStore::load_as(spec, format, &random).expect("loads"));
    let model = backend
        .open(&Arc::new(spec.clone()), &plan, &dense)
        .expect("opens");
    Opened {
        model,
        provider: Arc::new(FullyResident::new(image)),
    }
}

fn step(o: &mut Opened, tokens: &[u32], start: usize, sequence: usize) -> StepOutput {
    let row = |(i, t): (usize, &u32)| StepRow {
        token: *t,
        position: start + i,
        sequence,
        logits: true,
    };
    let batch = StepBatch {
        rows: tokens.iter().enumerate().map(row).collect(),
        taps: true,
        ..StepBatch::default()
    };
    let ticket = o.model.enqueue(&batch, &o.provider).expect("enqueues");
    o.model.finish(ticket).expect("finishes")
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn same(a: &StepOutput, b: &StepOutput, what: &str) {
    let taps = |o: &StepOutput| {
        let mut taps = o.taps.clone();
        taps.sort_by_key(|t| t.stage);
        taps
    };
    for (a, b) in taps(a).iter().zip(&taps(b)) {
        assert_eq!(a.stage, b.stage, "{what}");
        match (&a.data, &b.data) {
            (TapData::F32(x), TapData::F32(y)) => {
                assert_eq!(bits(x), bits(y), "{what}: first difference at {}", a.stage);
            }
            (x, y) => assert_eq!(x, y, "{what}: first difference at {}", a.stage),
        }
    }
    assert_eq!(a.taps.len(), b.taps.len());
    assert!(
        a.logits.iter().all(|l| l.is_finite()),
        "{what}: logits are finite"
    );
    assert_eq!(bits(&a.logits), bits(&b.logits), "{what}: logits");
    assert_eq!((&a.tokens, a.report), (&b.tokens, b.report), "{what}");
}

/// Root of the squared differences over the root of the squares of `a`.
fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut a.iter().copied())
}

/// What the attention of the first layer adds to the residual stream.
fn attended(o: &StepOutput) -> Vec<f32> {
    let stage = Stage::AttentionOutput(LayerId(0));
    let tap = o.taps.iter().find(|t| t.stage == stage).expect("tapped");
    let TapData::F32(values) = &tap.data else {
        panic!("it is FP32")
    };
    values.clone()
}

const TOKENS: [u32; 13] = [3, 200, 17, 17, 5, 99, 1, 0, 202, 64, 31, 8, 150];

#[test]
fn fast_equals_reference_bit_for_bit() {
    let mut encodings = vec![ExpertEncoding::F16];
    encodings.extend(BlockSize::ALL.map(|block| ExpertEncoding::Qpacked { block }));
    for (name, spec) in cases() {
        for encoding in &encodings {
            for activations in [Activations::F32, Activations::F16] {
                let mut reference = open(&spec, *encoding, activations, None);
                let want = step(&mut reference, &TOKENS, 0, 0);
                let want_next = step(&mut reference, &[77], TOKENS.len(), 0);
                for isa in Isa::available() {
                    for threads in [1, 3] {
                        let what =
                            format!("{name}, {encoding:?}, {activations:?}, {isa:?}, {threads} threads");
                        let mut fast = open(&spec, *encoding, activations, Some((isa, threads)));
                        same(&step(&mut fast, &TOKENS, 0, 0), &want, &what);
                        same(&step(&mut fast, &[77], TOKENS.len(), 0), &want_next, &what);
                    }
                }
            }
        }
    }
}

/// q8: the bits of the reference on every instruction set, thread count and cut; other bits than FP16's, and close.
#[test]
fn fast_equals_reference_bit_for_bit_with_q8_weights() {
    let encoding = ExpertEncoding::Qpacked {
        block: BlockSize::B32,
    };
    for (name, spec) in cases() {
        for activations in [Activations::F32, Activations::F16] {
            let open = |isa| open_with(&spec, encoding, activations, isa, false, DenseFormat::Q8);
            let mut reference = open(None);
            let want = step(&mut reference, &TOKENS, 0, 0);
            let want_next = step(&mut reference, &[77], TOKENS.len(), 0);
            for isa in Isa::available() {
                for (threads, cut) in [(1, 13), (3, 13), (2, 4)] {
                    let what = format!("{name}, {activations:?}, {isa:?}, {threads} threads, cut at {cut}");
                    let mut fast = open(Some((isa, threads)));
                    let first = step(&mut fast, &TOKENS[..cut], 0, 0);
                    if cut == TOKENS.len() {
                        same(&first, &want, &what);
                    } else {
                        step(&mut fast, &TOKENS[cut..], cut, 0);
                    }
                    same(&step(&mut fast, &[77], TOKENS.len(), 0), &want_next, &what);
                }
            }
            let mut plain = open_with(&spec, encoding, activations, None, false, DenseFormat::F16);
            // Of the first attention only: further on a token may be routed elsewhere.
            let plain = step(&mut plain, &TOKENS, 0, 0);
            let relative = relative_difference(&attended(&plain), &attended(&want));
            assert!(relative > 1e-4 && relative < 0.02, "{name}: {relative}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_step() {
    let encoding = ExpertEncoding::Qpacked {
        block: BlockSize::B64,
    };
    for (name, spec) in cases() {
        let mut whole = open(&spec, encoding, Activations::F16, Some((Isa::best(), 2)));
        let want = step(&mut whole, &TOKENS, 0, 0);
        for cut in [1, 4, 12] {
            let mut parts = open(&spec, encoding, Activations::F16, Some((Isa::best(), 2)));
            // Another sequence in between, and a position that is run twice, change nothing.
            let first = step(&mut parts, &TOKENS[..cut], 0, 1);
            step(&mut parts, &[9, 9], 0, 0);
            step(&mut parts, &[1], cut, 1);
            let second = step(&mut parts, &TOKENS[cut..], cut, 1);
            let joined = [bits(&first.logits), bits(&second.logits)].concat();
            assert_eq!(joined, bits(&want.logits), "{name}, cut at {cut}");
        }
        // Both sequences in one step: neighbours do not change a row.
        let mut both = open(&spec, encoding, Activations::F16, Some((Isa::best(), 2)));
        let rows = |sequence, tokens: &[u32]| {
            let row = move |(position, token): (usize, &u32)| StepRow {
                token: *token,
                position,
                sequence,
                logits: true,
            };
            tokens.iter().enumerate().map(row).collect::<Vec<_>>()
        };
        let batch = StepBatch {
            rows: [rows(1, &[4, 5, 6]), rows(0, &TOKENS)].concat(),
            taps: false,
            ..StepBatch::default()
        };
        let ticket = both.model.enqueue(&batch, &both.provider).expect("enqueues");
        let out = both.model.finish(ticket).expect("finishes");
        assert_eq!(
            bits(&out.logits[3 * spec.vocab..]),
            bits(&want.logits),
            "{name}: two sequences"
        );
    }
}

/// The integer executor: the same bits on every instruction set, thread count and cut; as close to FP32 as FP16 is.
#[test]
fn integer_activations_are_invariant_and_close() {
    for block in [BlockSize::B32, BlockSize::B256] {
        let encoding = ExpertEncoding::Qpacked { block };
        for (name, spec) in cases() {
            let mut exact = open(&spec, encoding, Activations::F32, None);
            let exact = step(&mut exact, &TOKENS, 0, 0);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                for (threads, cut) in [(1, 13), (3, 13), (2, 4)] {
                    let isa = Some((isa, threads));
                    let mut o = open_with(&spec, encoding, Activations::F16, isa, true, DenseFormat::F16);
                    let mut logits = step(&mut o, &TOKENS[..cut], 0, 0).logits;
                    if cut < TOKENS.len() {
                        logits.extend(step(&mut o, &TOKENS[cut..], cut, 0).logits);
                    }
                    let want = first.get_or_insert_with(|| logits.clone());
                    assert_eq!(bits(&logits), bits(want), "{name}, {block}, {isa:?}, {cut}");
                }
            }
            let relative = relative_difference(&exact.logits, &first.expect("an instruction set"));
            assert!(relative > 0.0 && relative < 1e-2, "{name}: {relative}");
        }
    }
}

#[test]
fn integers_need_packed_experts_and_narrow_activations() {
    let (_, spec) = cases().remove(0);
    let packed = ExpertEncoding::Qpacked {
        block: BlockSize::B32,
    };
    for (encoding, activations, works) in [
        (packed, Activations::F16, true),
        (packed, Activations::F32, false),
        (ExpertEncoding::F16, Activations::F16, false),
    ] {
        let backend = FastCpu::new(None, Arc::new(NoExperts), encoding)
            .expect("threads")
            .with_integers(true);
        let regime = Regime {
            activations,
            context: 8,
            sequences: 1,
            max_rows: 8,
        };
        assert_eq!(
            backend.plan(&spec, &regime).is_ok(),
            works,
            "{encoding:?} {activations:?}"
        );
    }
}

#[test]
fn fp16_activations_stay_close_to_fp32() {
    for (name, spec) in cases() {
        let run = |activations| {
            let mut o = open(&spec, ExpertEncoding::F16, activations, Some((Isa::best(), 2)));
            step(&mut o, &TOKENS, 0, 0)
        };
        let (a, b) = (run(Activations::F32), run(Activations::F16));
        let relative = relative_difference(&a.logits, &b.logits);
        assert!(relative > 0.0 && relative < 1e-2, "{name}: {relative}");
    }
}

#[test]
fn router_taps_name_the_experts_that_were_used() {
    let (_, spec) = cases().remove(0);
    let mut o = open(
        &spec,
        ExpertEncoding::F16,
        Activations::F32,
        Some((Isa::best(), 2)),
    );
    let out = step(&mut o, &TOKENS, 0, 0);
    let index = out
        .taps
        .iter()
        .find(|t| t.stage == Stage::TopkIndex(LayerId(1)))
        .expect("tapped");
    let TapData::I32(ids) = &index.data else {
        panic!("indices are integers")
    };
    assert_eq!(ids.len(), TOKENS.len() * 2);
    assert_eq!(out.report.routed, 2 * ids.len() as u64);
}

#[test]
fn a_bad_batch_is_refused_and_changes_nothing() {
    let (_, spec) = cases().remove(0);
    for isa in [None, Some((Isa::best(), 1))] {
        let mut o = open(&spec, ExpertEncoding::F16, Activations::F16, isa);
        let row = |token, position, sequence| StepRow {
            token,
            position,
            sequence,
            logits: true,
        };
        let bad: [(&str, Vec<StepRow>); 7] = [
            ("0 rows", vec![]),
            ("17 rows", (0..17).map(|p| row(1, p, 0)).collect()),
            ("token 203", vec![row(203, 0, 0)]),
            ("position 40", vec![row(1, 40, 0)]),
            ("sequence 2", vec![row(1, 0, 2)]),
            ("position 3 does not follow", vec![row(1, 3, 0)]),
            ("position 0 does not follow", vec![row(1, 0, 0), row(1, 0, 0)]),
        ];
        for (why, rows) in bad {
            let error = o
                .model
                .enqueue(
                    &StepBatch {
                        rows,
                        taps: false,
                        ..StepBatch::default()
                    },
                    &o.provider,
                )
                .expect_err(why);
            let StepError::Invalid(text) = error else {
                panic!("{why}: {error}")
            };
            assert!(text.contains(why), "{text:?} should say {why:?}");
        }
        step(&mut o, &[1, 2], 0, 0);
    }
}
