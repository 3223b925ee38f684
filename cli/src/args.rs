//! What can be typed. What it means is decided in [`crate::resolve`].

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use horizon_cache::Policy;
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::synthetic::Shape;
use horizon_models::pack::{DEFAULT_BLOCK, DEFAULT_QUANTIZER};
use horizon_runtime::engine::ExecutorKind;
use horizon_runtime::size::parse_bytes;

pub use crate::names::*;

/// Run mixture-of-experts language models with INT4 routed experts.
///
/// Routed experts are packed to INT4 (the qpacked format) and executed from their packed form; everything else
/// stays FP16. Without -m, commands use a small story model that is part of the program.
#[derive(Debug, Parser)]
#[command(name = "horizon", version, after_help = AFTER_HELP, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "\
Exit codes: 0 success, 1 the work failed, 2 the command line is wrong, 130 interrupted.
Errors go to stderr. With --json an error is also printed to stdout, as {\"error\": {\"message\": ..., \"causes\": [...]}};
a command line that cannot be parsed is reported on stderr only.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue a text.
    ///
    /// The text goes to stdout as it is generated; speed and memory go to stderr afterwards.
    Run(RunArgs),
    /// Talk with a model, turn by turn.
    ///
    /// Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation, /reset begins a new one. Each line of
    /// piped input is a turn.
    Chat(ChatArgs),
    /// Pack a checkpoint into an artifact: routed experts to INT4, the rest to FP16.
    Pack(PackArgs),
    /// Show what a model is made of and what it needs.
    Inspect(InspectArgs),
    /// Measure a model's output.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Measure speed.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Study the expert cache without a model.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Print a completion script for a shell.
    Completions {
        /// Shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff), of the program or of one command.
    Man {
        /// Command, e.g. `run` or `eval logits`.
        command: Vec<String>,
    },
}

/// `horizon eval`.
#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Write the logits at every position of a token sequence to a safetensors file.
    ///
    /// Tensor `logits`, F32, [positions, vocab]. With --taps also, for every layer L, `hidden.L`, `attn_out.L`,
    /// `mlp_out.L` (F32 [positions, hidden]) and, for layers with experts, `router_logits.L` (F32), `topk_index.L`
    /// (I32) and `topk_weight.L` (F32).
    Logits(LogitsArgs),
    /// Mean negative log likelihood of a text, and its exponential.
    ///
    /// The text is tokenised whole, nothing added, and cut into consecutive windows; each window runs on its own
    /// from position 0, and every token but the first of each window is predicted. The mean is over all
    /// predicted tokens, in nats.
    Perplexity(PerplexityArgs),
}

/// `horizon bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Decode speed, as a fraction of what this machine's memory bandwidth allows.
    Decode(BenchDecodeArgs),
    /// Write a synthetic checkpoint with the shapes of a real model, for measurements.
    MakeCheckpoint(MakeCheckpointArgs),
}

/// `horizon cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Replay routing traces: what each policy would have hit at each capacity, and the best that any could have.
    ///
    /// A trace is recorded with `run --trace FILE` or `bench decode --trace FILE`. Several traces of one model are
    /// replayed one after another as one. The optimum knows the future (Belady's MIN); it is the bound, not a policy.
    Simulate(SimulateArgs),
}

/// Which model, and how it is executed.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model: a packed artifact, a Hugging Face checkpoint directory, or org/name on the hub [default: the
    /// embedded demo model]
    #[arg(short, long, value_name = "DIR|ORG/NAME")]
    pub model: Option<String>,
    #[command(flatten)]
    pub execution: ExecutionArgs,
}

/// How a model is executed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Execution")]
pub struct ExecutionArgs {
    /// What computes [default: cuda if there is a card that holds the model, else cpu]
    #[arg(long, value_enum, value_name = "NAME")]
    pub backend: Option<BackendName>,
    /// How routed experts are computed; without --backend it is the backend that has it [default: cpu-grouped;
    /// persistent-v1 on cuda]
    #[arg(long, value_name = "NAME", value_parser = executors())]
    pub executor: Option<ExecutorKind>,
    /// How routed experts are held and executed; f16 is the unquantized control
    #[arg(long, value_enum, default_value_t = ExpertsName::Qpacked)]
    pub experts: ExpertsName,
    /// How attention, shared experts, dense layers and the output head are held and executed; q8 is made at load
    #[arg(long, value_enum, default_value_t = DenseName::F16)]
    pub dense: DenseName,
    /// Type that matrix products read their activations in, and of the KV cache
    #[arg(long, value_enum, default_value_t = ActivationsName::F16)]
    pub activations: ActivationsName,
    #[command(flatten)]
    pub packing: PackingArgs,
    #[command(flatten)]
    pub residency: ResidencyArgs,
    /// Positions of the context [default: the model's, at most 4096]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub ctx: Option<NonZeroUsize>,
    /// Threads, at most 1024 [default: all cores]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub threads: Option<NonZeroUsize>,
}

/// A number of which there is at least one.
fn positive(text: &str) -> Result<NonZeroUsize, String> {
    text.parse()
        .map_err(|_| "must be a whole number, at least 1".to_owned())
}

/// A number of threads that a machine can start.
fn thread_count(text: &str) -> Result<NonZeroUsize, String> {
    let most = horizon_core::cpu::MAX_THREADS;
    let count: Option<NonZeroUsize> = text.parse().ok();
    count
        .filter(|n| n.get() <= most)
        .ok_or_else(|| format!("must be 1 to {most}"))
}

/// Which experts are resident.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ResidencyArgs {
    /// Experts of each layer that are resident; the others are brought when they are needed [default: all, without a
    /// cache]
    #[arg(short, long, value_name = "N")]
    pub capacity: Option<usize>,
    /// Memory that the device may use, such as 6GiB or 1.5GB: as many experts are resident as fit beside everything
    /// else. With -c: refuse to start if they do not fit
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub vram: Option<u64>,
    #[arg(long, value_name = "NAME", help = policy_help())]
    pub policy: Option<Policy>,
    /// Spare slots that missing experts are brought to, shared by all layers [default: the experts of a token]
    #[arg(long, value_name = "N")]
    pub spares: Option<usize>,
}

fn policy_help() -> String {
    format!(
        "Which experts make room: {} [default: {}]",
        Policy::ALL.map(Policy::name).join(", "),
        Policy::default()
    )
}

/// How experts are packed.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct PackingArgs {
    #[arg(long, value_enum, help = quantizer_help())]
    pub quantizer: Option<QuantizerName>,
    #[arg(long, value_name = "B", help = block_help())]
    pub block: Option<BlockSize>,
}

fn quantizer_help() -> String {
    let default = match DEFAULT_QUANTIZER {
        Quantizer::Absmax => "absmax",
        Quantizer::Mse => "mse",
    };
    format!("How the scales of packed experts are chosen [default: {default}, or as an artifact was packed]")
}

fn block_help() -> String {
    format!(
        "Values that share a scale: 32, 64, 128 or 256 [default: {DEFAULT_BLOCK}, or as an artifact was packed]"
    )
}

/// How tokens are chosen and when to stop. What is not given comes from the model's generation_config.json.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Generation")]
pub struct GenerateArgs {
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Take the most likely token every time
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    pub greedy: bool,
    /// Divides the logits; 0 is greedy
    #[arg(long, visible_alias = "temp", value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the smallest set of tokens whose probability reaches P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Above 1 makes tokens that occurred less likely
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the draws [default: a new one, reported]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Text that ends the answer and is not part of it; can be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on past the end of the text
    #[arg(long)]
    pub ignore_eos: bool,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Print JSON to stdout, and nothing else there
    #[arg(long)]
    pub json: bool,
    /// No notes, figures or progress on stderr
    #[arg(short, long)]
    pub quiet: bool,
}

/// `horizon run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Text to continue [default: stdin, if it is piped]
    pub prompt: Option<String>,
    /// Read the text from a file, byte for byte; - is stdin
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub file: Option<PathBuf>,
    /// Put the text through the model's chat template, as a user's message
    #[arg(long, conflicts_with = "raw")]
    pub chat: bool,
    /// Give the text to the model as it is, special tokens in it parsed (the default)
    #[arg(long)]
    pub raw: bool,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Print the prompt before the answer [default: when stdout is a terminal, without --chat]
    #[arg(long)]
    pub echo: bool,
    /// Special tokens in the answer's text [default: show, with --chat hide]
    #[arg(long, value_enum, value_name = "HOW")]
    pub special_tokens: Option<SpecialTokens>,
    /// Record which experts each token chose, for `horizon cache simulate`
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also measure memory bandwidth, and tell decode speed as a fraction of what it allows
    #[arg(long)]
    pub stats: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub generate: GenerateArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `horizon chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub generate: GenerateArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `horizon pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// Hugging Face checkpoint directory, or org/name on the hub
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Directory to write; it must not exist
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace an artifact that exists
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub packing: PackingArgs,
    /// Threads, at most 1024 [default: all cores]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub threads: Option<NonZeroUsize>,
    #[command(flatten)]
    pub out: OutputArgs,
}

/// `horizon inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model: an artifact, a checkpoint directory, or org/name [default: the embedded demo model]
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub positional: Option<String>,
    /// Check the SHA-256 of everything in an artifact
    #[arg(long)]
    pub verify: bool,
    /// Quantize a large checkpoint in memory to tell the quantization error (small ones always are)
    #[arg(long)]
    pub measure: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `horizon eval logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// Token ids, separated by commas or spaces
    #[arg(long, value_name = "IDS")]
    pub tokens: String,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Also write what the stages of every layer produced
    #[arg(long)]
    pub taps: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub out: OutputArgs,
}

/// `horizon eval perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// Text, UTF-8
    pub file: PathBuf,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub window: usize,
    /// Only the first N bytes of the file; a character cut off there is dropped [default: the whole file]
    #[arg(long, value_name = "N")]
    pub bytes: Option<u64>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `horizon bench decode`.
#[derive(Debug, Args)]
pub struct BenchDecodeArgs {
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    pub tokens: u32,
    /// Tokens of the prompt, drawn at random
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: u32,
    /// Seed of the prompt
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Drop the model's files from the page cache first, and measure the disk's read rate instead of the cache's
    #[arg(long)]
    pub cold: bool,
    /// Also count which experts N random tokens choose, layer by layer
    #[arg(long, value_name = "N")]
    pub routing_load: Option<usize>,
    /// Record which experts each token chose, for `horizon cache simulate`; copying that out of the steps takes a
    /// little of their time
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `horizon cache simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Routing traces
    #[arg(value_name = "TRACE", required_unless_present = "trace")]
    pub traces: Vec<PathBuf>,
    /// A routing trace; the same as naming it without the flag
    #[arg(long, value_name = "FILE")]
    pub trace: Vec<PathBuf>,
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help = policies_help())]
    pub policy: Vec<Policy>,
    /// Resident experts of each layer [default: about eight between the experts of a token and all]
    #[arg(short, long, value_name = "N,...", value_delimiter = ',')]
    pub capacity: Vec<usize>,
    /// Spare slots, shared by all layers [default: the experts of a token]
    #[arg(long, value_name = "N")]
    pub spares: Option<usize>,
    #[command(flatten)]
    pub output: OutputArgs,
}

fn policies_help() -> String {
    format!(
        "Which experts make room: {} [default: all of them]",
        Policy::ALL.map(Policy::name).join(", ")
    )
}

/// `horizon bench make-checkpoint`.
#[derive(Debug, Args)]
pub struct MakeCheckpointArgs {
    #[arg(long, value_name = "SHAPE", help = format!("Which model's shapes: {}", Shape::NAMES.join(", ")))]
    pub shape: String,
    /// Directory to write; it must not exist
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Layers [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub layers: Option<NonZeroUsize>,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub out: OutputArgs,
}

/// An environment variable of Hugging Face's programs (`HF_HOME`, `HF_TOKEN` …): where the hub and its cache are.
/// Nothing else is read from the environment.
#[must_use]
pub fn hub_variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
