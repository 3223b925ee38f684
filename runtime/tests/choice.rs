//! Which backend runs a model, with drivers that fail in every way and, with the feature `cuda-emulator`, with kernels
//! compiled for the host.

use std::sync::Mutex;

use horizon_core::artifact::Progress;
use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_kernels_cuda::driver::{DriverError, SharedDriver};
use horizon_models::demo;
use horizon_models::source::{ExpertsMode, ModelSource};
use horizon_runtime::device::{DeviceError, OpenDevice};
use horizon_runtime::engine::{BackendChoice, BackendKind, Engine, EngineError, EngineOptions, LoadedEngine};
use horizon_runtime::residency::{CacheOptions, Capacity};

const AUTOMATIC: BackendChoice = BackendChoice::Automatic;
const CUDA: BackendChoice = BackendChoice::Named(BackendKind::Cuda);

fn source() -> ModelSource {
    let demo = demo::embedded().expect("sound assets");
    ModelSource::in_memory(demo::EMBEDDED_NAME, demo.files, demo.safetensors).expect("a model")
}

fn options(backend: BackendChoice) -> EngineOptions {
    EngineOptions {
        backend,
        executor: None,
        cache: None,
        experts: ExpertsMode::Qpacked {
            block: None,
            quantizer: None,
        },
        dense: DenseFormat::F16,
        activations: Activations::F16,
        context: Some(64),
        threads: None,
    }
}

/// What was told while a model was loaded, and whether anything was.
#[derive(Default)]
struct Told {
    notes: Mutex<Vec<String>>,
    begun: Mutex<bool>,
}

impl Progress for Told {
    fn begin(&self, _: &str, _: u64) {
        *self.begun.lock().expect("no panic") = true;
    }

    fn advance(&self, _: u64) {}

    fn note(&self, text: &str) {
        self.notes.lock().expect("no panic").push(text.to_owned());
    }
}

/// What opening the demo model gives, and what was told.
fn open(options: &EngineOptions, device: OpenDevice<'_>) -> (Result<Engine, EngineError>, Told) {
    let told = Told::default();
    let loaded = LoadedEngine::load_for(&source(), options, device, &told);
    (loaded.and_then(LoadedEngine::admit), told)
}

/// Drivers that cannot be used, and whether a user who asked for nothing in particular hears of it.
fn broken() -> [(DriverError, bool); 4] {
    [
        (DriverError::Absent("no driver".into()), false),
        (DriverError::OldDriver { found: 12_040 }, true),
        (
            DriverError::UnsupportedDevice {
                name: "GTX".into(),
                capability: 61,
            },
            true,
        ),
        (
            DriverError::Lost {
                call: "cuCtxCreate",
                reason: "gone".into(),
            },
            true,
        ),
    ]
}

#[test]
fn a_card_that_cannot_be_used_is_told_once_and_no_card_is_not_told() {
    for (error, noisy) in broken() {
        let device = || Err::<SharedDriver, _>(error.clone());
        let (engine, told) = open(&options(AUTOMATIC), &device);
        let engine = engine.expect("the CPU runs it");
        let (settings, notes) = (engine.settings(), told.notes.lock().expect("no panic"));
        assert_eq!(settings.backend, BackendKind::Cpu);
        assert!(settings.device_memory.is_none());
        assert_eq!(settings.backend_reason, error.to_string());
        assert_eq!(notes.len(), usize::from(noisy), "{notes:?}");
        assert!(
            notes
                .iter()
                .all(|n| n.contains("CPU") && n.contains(&error.to_string())),
            "{notes:?}"
        );
    }
}

#[test]
fn a_named_card_that_cannot_be_used_is_an_error_before_anything_is_loaded() {
    for (error, _) in broken() {
        let device = || Err::<SharedDriver, _>(error.clone());
        let (engine, told) = open(&options(CUDA), &device);
        let message = engine.err().expect("refused").to_string();
        assert_eq!(message, format!("--backend cuda: {error}"));
        assert!(!*told.begun.lock().expect("no panic"), "{error}");
    }
}

#[test]
fn what_a_card_cannot_do_is_refused_without_looking_for_one() {
    let device = || -> Result<SharedDriver, DriverError> { unreachable!("a card is not needed to say so") };
    for (capacity, flag) in [
        (Capacity::Experts(8), "-c: "),
        (
            Capacity::Budget {
                bytes: 1 << 30,
                asked: None,
            },
            "--vram: ",
        ),
    ] {
        let mut o = options(CUDA);
        o.cache = Some(CacheOptions {
            capacity,
            spares: None,
            policy: horizon_cache::Policy::default(),
        });
        let error = open(&o, &device).0.err().expect("refused");
        assert!(
            matches!(&error, EngineError::Device(DeviceError::PartialResidency { .. })),
            "{error}"
        );
        assert!(error.to_string().starts_with(flag) && error.to_string().contains("--backend cpu"));
    }
    let mut o = options(CUDA);
    o.activations = Activations::F32;
    let error = open(&o, &device).0.err().expect("refused").to_string();
    assert!(error.contains("--activations f32"), "{error}");
}

#[cfg(feature = "cuda-emulator")]
mod emulated {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use horizon_kernels_cuda::driver::emulated::{EmulatedDriver, EmulatedOptions};
    use horizon_runtime::engine::ExecutorKind;
    use horizon_runtime::session::{Request, TextDecoder, TextError};

    use super::*;

    fn driver(memory_bytes: usize) -> SharedDriver {
        Arc::new(EmulatedDriver::new(EmulatedOptions {
            memory_bytes,
            ..EmulatedOptions::default()
        }))
    }

    struct NoText;

    impl TextDecoder for NoText {
        fn push(&mut self, _: u32) -> Result<String, TextError> {
            Ok(String::new())
        }

        fn finish(&mut self) -> Result<String, TextError> {
            Ok(String::new())
        }
    }

    /// "Once upon a time", and what follows.
    fn story(engine: Engine) -> Vec<u32> {
        let request = Request {
            prompt: vec![413, 421, 263, 386],
            max_tokens: Some(12),
            ..Request::default()
        };
        let mut session = engine.into_session();
        session
            .generate(&request, &mut NoText, &AtomicBool::new(false), &mut |_| {})
            .expect("generates")
            .token_ids
    }

    #[test]
    fn a_card_is_chosen_and_tells_the_same_story_from_the_memory_it_said() {
        let no_card = || Err(DriverError::Absent("none".into()));
        let want = story(open(&options(AUTOMATIC), &no_card).0.expect("opens"));
        let card = driver(1 << 30);
        let device = || Ok(card.clone());
        let (engine, told) = open(&options(AUTOMATIC), &device);
        let engine = engine.expect("opens");
        assert_eq!(*told.notes.lock().expect("no panic"), [""; 0]);
        let settings = engine.settings().clone();
        assert_eq!(
            (settings.backend, settings.prefill_chunk),
            (BackendKind::Cuda, 512)
        );
        assert_eq!(settings.decode_executor.0, "persistent-v1");
        assert_eq!(settings.prefill_executor.0, "grouped-t3");
        let memory = settings.device_memory.expect("a card has memory");
        assert_eq!(memory.total, memory.items.iter().map(|i| i.bytes).sum::<u64>());
        let admitted = card.allocated();
        assert_eq!(admitted.0, memory.total, "{memory:?}");
        assert_eq!(story(engine), want);
        assert_eq!(card.allocated(), admitted, "nothing is allocated after admission");
    }

    #[test]
    fn bandwidth_is_measured_in_memory_that_is_given_back_or_not_at_all() {
        use horizon_kernels_cuda::bandwidth::{read_bandwidth, read_bandwidth_over};
        let card = driver(64 << 20);
        let error = read_bandwidth(&card).expect_err("a cache would take part");
        assert!(matches!(error, DriverError::OutOfMemory { .. }), "{error}");
        let measured = read_bandwidth_over(&card, 1 << 20, 3).expect("measures");
        assert_eq!((measured.bytes, measured.passes), (1 << 20, 3));
        assert!(measured.bytes_per_second.is_finite() && measured.bytes_per_second > 0.0);
        assert_eq!(card.memory().expect("tells"), (64 << 20, 64 << 20));
    }

    #[test]
    fn every_executor_that_is_named_runs() {
        let no_card = || Err(DriverError::Absent("none".into()));
        let want = story(open(&options(AUTOMATIC), &no_card).0.expect("opens"));
        for executor in BackendKind::Cuda.executors() {
            let card = driver(1 << 30);
            let mut o = options(CUDA);
            o.executor = Some(executor);
            let engine = open(&o, &|| Ok(card.clone())).0.expect("opens");
            let ExecutorKind::Cuda(named) = executor else {
                unreachable!("{executor:?}")
            };
            assert_eq!(engine.settings().decode_executor.0, named.name());
            assert_eq!(story(engine), want, "{executor:?}");
        }
    }

    #[test]
    fn a_card_that_is_too_small_is_refused_with_both_numbers() {
        let card = driver(8 << 20);
        let device = || Ok(card.clone());
        let error = open(&options(CUDA), &device).0.err().expect("does not fit");
        let EngineError::Device(DeviceError::DoesNotFit { needed, free, .. }) = &error else {
            panic!("{error}")
        };
        assert!(needed > free && *free <= 8 << 20);
        let message = error.to_string();
        assert!(
            message.contains("8.00 MiB") && message.contains("--backend cpu"),
            "{message}"
        );
        assert_eq!(card.allocated().1, 0, "nothing was allocated");
        let (engine, told) = open(&options(AUTOMATIC), &device);
        assert_eq!(
            engine.expect("the CPU runs it").settings().backend,
            BackendKind::Cpu
        );
        let notes = told.notes.lock().expect("no panic");
        assert!(notes.len() == 1 && notes[0].contains(&message), "{notes:?}");
    }
}
