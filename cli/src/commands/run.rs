//! `horizon run`: one prompt, one answer.

use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::atomic::Ordering;

use horizon_core::artifact::Progress;
use horizon_models::chat::{Message, RenderOptions};
use horizon_runtime::process::ResidentMemory;
use horizon_runtime::residency::ResidencyReport;
use horizon_runtime::session::{Answer, Request, StopReason};
use horizon_runtime::text::TextFiles;
use serde::Serialize;

use super::model;
use super::report::{ResolvedPlan, TimingReport, residency_line, summary};
use super::trace::{self, TraceReport, Tracing};
use crate::args::{RunArgs, SpecialTokens};
use crate::interrupt::Work;
use crate::output::{CliError, Output, write_stdout};
use crate::resolve::{ModelPlace, engine_options, generation};

/// The object that `--json` prints.
#[derive(Serialize)]
struct RunReport<'a> {
    text: &'a str,
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    stop_reason: StopReason,
    stop_string: Option<&'a str>,
    timings: TimingReport,
    memory: ResidentMemory,
    #[serde(flatten)]
    residency: ResidencyReport,
    trace: Option<&'a TraceReport>,
    settings: &'a ResolvedPlan,
    notes: &'a [String],
}

/// Generates an answer.
pub fn run(args: RunArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    let prompt = prompt(&args)?;
    let options = engine_options(&args.model.execution)?;
    // Before anything is loaded: what was typed must make sense by itself.
    generation(
        &args.generate,
        &horizon_models::generation::GenerationConfig::default(),
    )?;
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(args.model.model.as_deref()), &bar)?;
    trace::check(args.trace.as_deref(), source.spec())?;
    let (engine, text) = model::load(source, &options, &bar)?;
    let plan = generation(&args.generate, &text.generation)?;
    let prompt_ids = encode(&args, &text, &prompt)?;
    if !args.chat && args.prompt.is_none() && prompt.ends_with('\n') {
        bar.note("the prompt ends with a line break, which the model sees");
    }
    let special_shown = args.special_tokens.unwrap_or(match args.chat {
        true => SpecialTokens::Hide,
        false => SpecialTokens::Show,
    }) == SpecialTokens::Show;
    let resolved = ResolvedPlan::new(&engine, &plan, args.chat, special_shown);
    let (open_timings, notes) = (engine.timings(), engine.notes().to_vec());
    let request = Request {
        prompt: prompt_ids,
        sampling: plan.sampling,
        max_tokens: plan.max_tokens,
        stop: plan.stop.clone(),
        eos: plan.eos_token_ids.clone(),
    };
    let echo = args.echo || (!args.chat && !out.is_json() && io::stdout().is_terminal());
    if echo && !out.is_json() {
        write_stdout(&prompt)?;
    }
    let residency = engine.residency();
    let tracing = Tracing::of(args.trace.as_deref(), &engine)?;
    let mut session = engine.into_session();
    let traced = tracing.begin(&mut session);
    let answer = generate(&mut session, &request, &text, special_shown, out)?;
    let trace = trace::save(traced, &mut session)?;
    let report = RunReport {
        text: &answer.text,
        prompt_ids: &request.prompt,
        token_ids: &answer.token_ids,
        stop_reason: answer.stop,
        stop_string: answer.stop_string.as_deref(),
        timings: TimingReport::new(open_timings, &answer, request.prompt.len()),
        memory: ResidentMemory::now(),
        residency: ResidencyReport::new(resolved.engine(), &residency),
        trace: trace.as_ref(),
        settings: &resolved,
        notes: &notes,
    };
    out.result(&report, || {
        if answer.text.ends_with('\n') {
            String::new()
        } else {
            "\n".into()
        }
    })?;
    let seed = (!plan.sampling.is_greedy()).then_some(plan.sampling.seed);
    out.note(&summary(&answer, request.prompt.len(), seed));
    if let Some(line) = residency_line(&report.residency) {
        out.note(&line);
    }
    if let Some(trace) = &trace {
        out.note(&trace.line());
    }
    if answer.stop == StopReason::Cancelled {
        Err(CliError::Interrupted)
    } else {
        Ok(())
    }
}

/// Generates, printing the text as it comes unless stdout is for JSON.
fn generate(
    session: &mut horizon_runtime::session::Session,
    request: &Request,
    text: &TextFiles,
    special_shown: bool,
    out: Output,
) -> Result<Answer, CliError> {
    let work = Work::begin();
    let mut decoder = text.tokenizer.continuation(!special_shown);
    let mut printed = Ok(());
    let answer = session.generate(request, &mut decoder, work.cancel(), &mut |piece| {
        if !out.is_json() && printed.is_ok() {
            printed = write_stdout(piece);
            if printed.is_err() {
                // Nobody reads: there is nothing to go on for.
                work.cancel().store(true, Ordering::SeqCst);
            }
        }
    });
    printed?;
    Ok(answer?)
}

/// The prompt's tokens.
fn encode(args: &RunArgs, text: &TextFiles, prompt: &str) -> Result<Vec<u32>, CliError> {
    if !args.chat {
        return Ok(text.tokenizer.encode(prompt, true)?);
    }
    let mut messages: Vec<Message> = args.system.iter().map(|s| Message::new("system", s)).collect();
    messages.push(Message::new("user", prompt));
    let rendered = text
        .chat_template()?
        .render(&messages, &RenderOptions::answer())?;
    // The template writes the special tokens itself.
    Ok(text.tokenizer.encode(&rendered, false)?)
}

/// The prompt, from the argument, the file or stdin: a raw one exactly as it is.
fn prompt(args: &RunArgs) -> Result<String, CliError> {
    let mut text = match (&args.prompt, &args.file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) if path != Path::new("-") => {
            let bytes = std::fs::read(path)
                .map_err(|e| CliError::failed(format!("--file {}: {e}", path.display())))?;
            utf8(bytes, &format!("--file {}", path.display()))?
        }
        (None, None) if io::stdin().is_terminal() => {
            return Err(CliError::usage(
                "there is no prompt: give it as an argument, with -f FILE, or on stdin",
            ));
        }
        (None, _) => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes)?;
            utf8(bytes, "stdin")?
        }
    };
    if args.chat && args.prompt.is_none() {
        // What ends a line of a file or a pipe is no part of a message.
        text.truncate(
            text.strip_suffix('\n')
                .map_or(text.len(), |t| t.trim_end_matches('\r').len()),
        );
    }
    if text.is_empty() {
        return Err(CliError::usage(
            "the prompt is empty; there is nothing to continue",
        ));
    }
    Ok(text)
}

fn utf8(bytes: Vec<u8>, place: &str) -> Result<String, CliError> {
    String::from_utf8(bytes).map_err(|e| {
        CliError::failed(format!(
            "{place}: not UTF-8 text at byte {}",
            e.utf8_error().valid_up_to()
        ))
    })
}
