//! From what was typed to what will be done.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};

use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_core::qpacked::Quantizer;
use horizon_models::generation::GenerationConfig;
use horizon_models::hub::RepoId;
use horizon_models::source::ExpertsMode;
use horizon_runtime::engine::{BackendChoice, BackendKind, EngineOptions, ExecutorKind};
use horizon_runtime::residency::{CacheOptions, Capacity};
use horizon_runtime::sampler::Sampling;
use serde::Serialize;

use crate::args::{
    ActivationsName, BackendName, DenseName, ExecutionArgs, ExpertsName, GenerateArgs, PackingArgs,
    QuantizerName, ResidencyArgs,
};
use crate::output::CliError;

/// Where the model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelPlace {
    /// In the program.
    Embedded,
    /// A directory (or what the user took for one).
    Path(PathBuf),
    /// A repository on the hub.
    Hub(RepoId),
}

impl ModelPlace {
    /// What `-m` means: a path that exists is that path; `org/name` is a repository; anything else is a path.
    #[must_use]
    pub fn of(model: Option<&str>) -> Self {
        let Some(model) = model else { return Self::Embedded };
        // `models/olmoe.hz` with a directory `models` here is a path, mistyped perhaps, and no repository.
        let begins_here = model
            .split_once('/')
            .is_some_and(|(first, _)| Path::new(first).is_dir());
        match RepoId::parse(model) {
            Some(repo) if !begins_here && !Path::new(model).exists() => Self::Hub(repo),
            _ => Self::Path(model.into()),
        }
    }
}

/// How the model is executed.
///
/// # Errors
/// A backend that this build lacks, an executor that the backend lacks; packing settings for experts that are not
/// packed.
pub fn engine_options(args: &ExecutionArgs) -> Result<EngineOptions, CliError> {
    let backend = backend(args)?;
    if let (BackendChoice::Named(kind), asked) = (backend, args.executor) {
        kind.executor(asked)
            .map_err(|e| CliError::usage(format!("--executor: {e}")))?;
    }
    let activations = match args.activations {
        ActivationsName::F16 => Activations::F16,
        ActivationsName::F32 => Activations::F32,
    };
    check_cache(&args.residency)?;
    Ok(EngineOptions {
        backend,
        executor: args.executor,
        cache: capacity(&args.residency).map(|capacity| CacheOptions {
            capacity,
            spares: args.residency.spares,
            policy: args.residency.policy.unwrap_or_default(),
        }),
        experts: experts_mode(args)?,
        dense: match args.dense {
            DenseName::F16 => DenseFormat::F16,
            DenseName::Q8 => DenseFormat::Q8,
        },
        activations,
        context: args.ctx.map(Into::into),
        threads: args.threads,
    })
}

/// The backend that is named, by an executor too: one of the CUDA backend's means that backend, any other `cpu`.
fn backend(args: &ExecutionArgs) -> Result<BackendChoice, CliError> {
    let kind = match (args.backend, args.executor) {
        (Some(BackendName::Cpu), _) => BackendKind::Cpu,
        (Some(BackendName::CpuReference), _) => BackendKind::CpuReference,
        (Some(BackendName::Cuda), _) | (None, Some(ExecutorKind::Cuda(_))) => BackendKind::Cuda,
        (Some(BackendName::Wgpu), _) => {
            let known = BackendKind::ALL.map(BackendKind::name).join(", ");
            return Err(CliError::usage(format!(
                "--backend wgpu: this build has no wgpu backend; it has {known}"
            )));
        }
        (None, Some(_)) => BackendKind::Cpu,
        (None, None) => return Ok(BackendChoice::Automatic),
    };
    if kind == BackendKind::Cuda {
        let flag = match (args.residency.capacity, args.residency.vram) {
            (Some(_), _) => "-c",
            (None, Some(_)) => "--vram",
            (None, None) => return Ok(BackendChoice::Named(kind)),
        };
        return Err(CliError::usage(format!(
            "{flag}: partial residency is not available on cuda yet; leave {flag} out to have all experts on the card, \
             or give --backend cpu"
        )));
    }
    Ok(BackendChoice::Named(kind))
}

/// Refuses settings of a cache that is not asked for.
fn check_cache(args: &ResidencyArgs) -> Result<(), CliError> {
    if args.capacity.is_some() || args.vram.is_some() {
        return Ok(());
    }
    let flag = match (args.policy, args.spares) {
        (Some(_), _) => "--policy",
        (None, Some(_)) => "--spares",
        (None, None) => return Ok(()),
    };
    Err(CliError::usage(format!(
        "{flag}: without --capacity N or --vram SIZE all experts are resident, and there is no cache to set"
    )))
}

/// How many experts are resident, if a cache is asked for.
fn capacity(args: &ResidencyArgs) -> Option<Capacity> {
    match (args.vram, args.capacity) {
        (Some(bytes), asked) => Some(Capacity::Budget { bytes, asked }),
        (None, asked) => asked.map(Capacity::Experts),
    }
}

fn experts_mode(args: &ExecutionArgs) -> Result<ExpertsMode, CliError> {
    match (args.experts, args.packing) {
        (ExpertsName::Qpacked, p) => Ok(ExpertsMode::Qpacked {
            block: p.block,
            quantizer: p.quantizer.map(Quantizer::from),
        }),
        (
            ExpertsName::F16,
            PackingArgs {
                quantizer: None,
                block: None,
            },
        ) => Ok(ExpertsMode::F16),
        (ExpertsName::F16, p) => {
            let flag = if p.block.is_some() {
                "--block"
            } else {
                "--quantizer"
            };
            Err(CliError::usage(format!(
                "{flag}: with --experts f16 nothing is packed"
            )))
        }
    }
}

impl From<QuantizerName> for Quantizer {
    fn from(name: QuantizerName) -> Self {
        match name {
            QuantizerName::Absmax => Self::Absmax,
            QuantizerName::Mse => Self::Mse,
        }
    }
}

/// How an answer is generated, decided.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GenerationPlan {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens; `None`: until something else ends the answer.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer; empty with `--ignore-eos`.
    pub eos_token_ids: Vec<u32>,
    /// Whether the model's end of text was switched off.
    pub ignore_eos: bool,
}

/// What was typed wins over what the model's files say; what neither says is off.
///
/// # Errors
/// A setting out of range, or an empty stop string.
pub fn generation(args: &GenerateArgs, model: &GenerationConfig) -> Result<GenerationPlan, CliError> {
    let asked_to_sample =
        args.temperature.is_some() || args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some();
    let off = Sampling::default();
    let sampling = Sampling {
        greedy: args.greedy || !(asked_to_sample || model.do_sample.unwrap_or(false)),
        temperature: args.temperature.or(model.temperature).unwrap_or(off.temperature),
        top_k: args.top_k.or(model.top_k).unwrap_or(off.top_k),
        top_p: args.top_p.or(model.top_p).unwrap_or(off.top_p),
        min_p: args.min_p.or(model.min_p).unwrap_or(off.min_p),
        repetition_penalty: args
            .repetition_penalty
            .or(model.repetition_penalty)
            .unwrap_or(off.repetition_penalty),
        seed: args.seed.unwrap_or_else(new_seed),
    };
    sampling
        .validate()
        .map_err(|e| CliError::usage(format!("--{e}")))?;
    if args.stop.iter().any(String::is_empty) {
        return Err(CliError::usage(
            "--stop: an empty text would end every answer at once",
        ));
    }
    Ok(GenerationPlan {
        sampling,
        max_tokens: args.max_tokens.or(model.max_new_tokens),
        stop: args.stop.clone(),
        eos_token_ids: if args.ignore_eos {
            Vec::new()
        } else {
            model.eos.clone()
        },
        ignore_eos: args.ignore_eos,
    })
}

/// A seed that differs from run to run; short enough to be typed, and exact in any JSON reader.
fn new_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

/// Token ids separated by commas or white space.
///
/// # Errors
/// What is not a token id.
pub fn token_ids(text: &str) -> Result<Vec<u32>, CliError> {
    text.split(|c: char| c == ',' || c.is_whitespace())
        .filter(|s| !s.is_empty())
        .map(|s| {
            s.parse()
                .map_err(|_| CliError::usage(format!("--tokens: {s:?} is not a token id")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn run_args(line: &[&str]) -> crate::args::RunArgs {
        let full = ["horizon", "run", "x"].iter().chain(line);
        match Cli::try_parse_from(full).expect("a sound command line").command {
            Command::Run(args) => args,
            other => unreachable!("{other:?}"),
        }
    }

    fn plan(line: &[&str], model: &GenerationConfig) -> Result<GenerationPlan, CliError> {
        generation(&run_args(line).generate, model)
    }

    fn demo() -> GenerationConfig {
        GenerationConfig {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_p: Some(0.95),
            max_new_tokens: Some(300),
            eos: vec![0, 9],
            ..GenerationConfig::default()
        }
    }

    #[test]
    fn the_models_files_give_the_defaults_and_the_command_line_wins() {
        let p = plan(&[], &demo()).expect("sound");
        assert!(!p.sampling.greedy && p.sampling.seed <= u64::from(u32::MAX));
        assert_eq!(
            (p.sampling.temperature, p.sampling.top_p, p.sampling.top_k),
            (0.7, 0.95, 0)
        );
        assert_eq!((p.max_tokens, p.eos_token_ids), (Some(300), vec![0, 9]));
        let line = [
            "--temp",
            "1.5",
            "--top-k",
            "3",
            "-n",
            "5",
            "--seed",
            "8",
            "--ignore-eos",
            "--stop",
            "a",
        ];
        let p = plan(&line, &demo()).expect("sound");
        assert_eq!(
            (p.sampling.temperature, p.sampling.top_p, p.sampling.top_k),
            (1.5, 0.95, 3)
        );
        assert_eq!((p.sampling.seed, p.max_tokens, p.stop.len()), (8, Some(5), 1));
        assert!(p.eos_token_ids.is_empty() && p.ignore_eos);
    }

    #[test]
    fn greedy_is_the_default_without_files_and_a_sampling_flag_ends_it() {
        let none = GenerationConfig::default();
        let greedy =
            |line: &[&str], model: &GenerationConfig| plan(line, model).expect("sound").sampling.greedy;
        assert!(greedy(&[], &none) && greedy(&["--greedy"], &demo()));
        assert!(greedy(&["--repetition-penalty", "1.2"], &none));
        for flag in [
            ["--temp", "0.5"],
            ["--top-k", "4"],
            ["--top-p", "0.5"],
            ["--min-p", "0.1"],
        ] {
            assert!(!greedy(&flag, &none), "{flag:?}");
        }
    }

    #[test]
    fn settings_out_of_range_are_usage_errors_that_name_the_flag() {
        for (line, flag) in [
            (["--top-p", "1.5"], "--top-p = 1.5"),
            (["--temp", "nan"], "--temperature"),
            (["--min-p", "2"], "--min-p"),
            (["--repetition-penalty", "0"], "--repetition-penalty"),
            (["--stop", ""], "--stop"),
        ] {
            let error = plan(&line, &demo()).expect_err(flag);
            assert!(
                matches!(&error, CliError::Usage(m) if m.starts_with(flag)),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_model_is_a_path_a_repository_or_the_embedded_one() {
        let here = env!("CARGO_MANIFEST_DIR");
        assert_eq!(ModelPlace::of(None), ModelPlace::Embedded);
        assert_eq!(ModelPlace::of(Some(here)), ModelPlace::Path(here.into()));
        for name in ["allenai/OLMoE-1B-7B-0924", "org/name@v1"] {
            let repo = RepoId::parse(name).expect("a repository");
            assert_eq!(ModelPlace::of(Some(name)), ModelPlace::Hub(repo), "{name}");
        }
        // `src` is a directory here, so the user means something in it.
        for path in [
            "src/no-such",
            "nothing-here",
            "./a/b",
            "../b",
            "a/b/c",
            "/no/such",
            "a/",
            "a b/c",
        ] {
            assert_eq!(
                ModelPlace::of(Some(path)),
                ModelPlace::Path(path.into()),
                "{path}"
            );
        }
    }

    #[test]
    fn backends_that_are_not_built_in_and_contradictions_are_usage_errors() {
        let options = |line: &[&str]| engine_options(&run_args(line).model.execution);
        for line in [
            &["--backend", "wgpu"] as &[&str],
            &["--backend", "cuda", "-c", "4"],
            &["--backend", "cuda", "--vram", "4GiB"],
            &["--executor", "persistent-v1", "-c", "4"],
            &["--backend", "cuda", "--executor", "cpu-grouped"],
            &["--backend", "cpu", "--executor", "persistent-v1"],
            &["--experts", "f16", "--block", "32"],
            &["--experts", "f16", "--quantizer", "mse"],
        ] {
            assert!(matches!(options(line), Err(CliError::Usage(_))), "{line:?}");
        }
        let o = options(&["--block", "64", "--activations", "f32", "--ctx", "77"]).expect("sound");
        assert_eq!(
            (o.activations, o.context, o.threads),
            (Activations::F32, Some(77), None)
        );
        assert!(
            matches!(o.experts, ExpertsMode::Qpacked { block: Some(b), quantizer: None } if b.get() == 64)
        );
    }

    #[test]
    fn an_executor_names_its_backend_and_nothing_named_leaves_the_choice() {
        let backend = |line: &[&str]| {
            engine_options(&run_args(line).model.execution)
                .expect("sound")
                .backend
        };
        assert_eq!(backend(&[]), BackendChoice::Automatic);
        assert_eq!(backend(&["-c", "4"]), BackendChoice::Automatic);
        for kind in [BackendKind::Cpu, BackendKind::Cuda] {
            let named = BackendChoice::Named(kind);
            assert_eq!(backend(&["--backend", kind.name()]), named);
            for executor in kind.executors() {
                assert_eq!(backend(&["--executor", executor.name()]), named, "{executor:?}");
            }
        }
    }

    #[test]
    fn token_lists_may_have_commas_or_spaces() {
        assert_eq!(token_ids("1, 2,3 4\n").expect("sound"), [1, 2, 3, 4]);
        assert_eq!(token_ids("").expect("empty"), [0u32; 0]);
        assert!(token_ids("1,x").is_err() && token_ids("-1").is_err());
    }
}
