//! The `horizon` command: parse, resolve, run, report.

mod args;
mod commands;
mod interrupt;
mod names;
mod output;
mod parse;
mod resolve;

use std::process::ExitCode;
use std::time::Instant;

use args::{BenchCommand, CacheCommand, Command, EvalCommand};
use output::CliError;

fn main() -> ExitCode {
    let started = Instant::now();
    let cli = parse::parse(std::env::args_os()).unwrap_or_else(|e| e.exit());
    let json = wants_json(&cli.command);
    let done = interrupt::install().and_then(|()| dispatch(cli.command, started));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(json),
    }
}

fn dispatch(command: Command, started: Instant) -> Result<(), CliError> {
    match command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::chat(args),
        Command::Pack(args) => commands::pack::pack(args),
        Command::Inspect(args) => commands::inspect::inspect(args),
        Command::Eval(EvalCommand::Logits(args)) => commands::eval::logits(args),
        Command::Eval(EvalCommand::Perplexity(args)) => commands::eval::perplexity(args),
        Command::Bench(BenchCommand::Decode(args)) => commands::bench::decode(args, started),
        Command::Bench(BenchCommand::MakeCheckpoint(args)) => commands::bench::make_checkpoint(args),
        Command::Cache(CacheCommand::Simulate(args)) => commands::cache::simulate(args),
        Command::Completions { shell } => commands::about::completions(shell),
        Command::Man { command } => commands::about::man(&command),
    }
}

fn wants_json(command: &Command) -> bool {
    match command {
        Command::Run(a) => a.output.json,
        Command::Chat(a) => a.output.json,
        Command::Pack(a) => a.out.json,
        Command::Inspect(a) => a.output.json,
        Command::Eval(EvalCommand::Logits(a)) => a.out.json,
        Command::Eval(EvalCommand::Perplexity(a)) => a.output.json,
        Command::Bench(BenchCommand::Decode(a)) => a.output.json,
        Command::Bench(BenchCommand::MakeCheckpoint(a)) => a.out.json,
        Command::Cache(CacheCommand::Simulate(a)) => a.output.json,
        Command::Completions { .. } | Command::Man { .. } => false,
    }
}
