//! What a plan is written to: pictures, schedules, and standard output.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use pleach::packing::Strategy;
use pleach::schedule::generate::packed::PackedTrees;
use pleach::schedule::msccl::{self, ExportError, Exported, MAX_STEPS_RCCL};
use pleach::schedule::verify::verify;
use pleach::schedule::{Access, Algorithm, Schedule, generate};

use super::outcome::Plan;
use super::{Arguments, dot, svg};
use crate::cli::CommandError;

/// Writes every file that was asked for.
pub(super) fn write(arguments: &Arguments, plan: &Plan) -> Result<(), CommandError> {
    if let Some(path) = &arguments.svg {
        save("picture", path, &svg::picture(plan))?;
    }
    if let Some(path) = &arguments.dot {
        save("graph", path, &dot::graph(plan))?;
    }
    if arguments.schedule.is_none() && arguments.msccl.is_none() {
        return Ok(());
    }
    let schedule = scheduled(plan)?;
    if let Some(path) = &arguments.msccl {
        save("algorithm", path, &exported(arguments, plan, &schedule, path)?)?;
    }
    if let Some(path) = &arguments.schedule {
        save("schedule", path, &schedule.to_string())?;
        proved(plan, schedule)?;
    }
    Ok(())
}

fn scheduled(plan: &Plan) -> Result<Schedule, CommandError> {
    let none =
        |error: &dyn std::fmt::Display| CommandError::usage(format!("no schedule: {}, {error}", plan.source));
    if plan.topology.ranks() == 1 {
        return Err(none(&"there is one rank, and nothing to move; take more of them"));
    }
    let trees = PackedTrees::new(&plan.packing, &plan.topology, 0).map_err(|error| none(&error))?;
    let algorithm = Algorithm::Packed(Some(Arc::new(trees)));
    generate(plan.packing.collective, &algorithm, plan.topology.ranks(), Access::Put)
        .map_err(|error| none(&error))
}

fn proved(plan: &Plan, schedule: Schedule) -> Result<(), CommandError> {
    verify(schedule).map(|_| ()).map_err(|violation| {
        CommandError::failed(format!(
            "wrong schedule: {}, {violation}; this is a defect of pleach, please report it",
            plan.source
        ))
    })
}

/// The schedule in MSCCL's form, read back and proved before anybody gets it.
fn exported(
    arguments: &Arguments,
    plan: &Plan,
    schedule: &Schedule,
    path: &Path,
) -> Result<String, CommandError> {
    let Exported { xml, chunks, channels, thread_blocks, steps, loss } =
        msccl::export(schedule).map_err(|error| {
            let advice =
                if matches!(error, ExportError::TooMany { .. }) { smaller(arguments, plan) } else { "" };
            CommandError::usage(format!("no algorithm: {}, {error}{advice}", path.display()))
        })?;
    let read = msccl::import(&xml).map_err(|error| {
        CommandError::failed(format!(
            "wrong algorithm: {}, {error}; this is a defect of pleach, please report it",
            path.display()
        ))
    })?;
    proved(plan, read)?;
    let mut words = format!(
        "{}: proved; {chunks} chunks, {channels} channels, up to {thread_blocks} thread blocks a GPU; not run on GPUs here",
        path.display()
    );
    if loss > 0.0 {
        words.push_str(&format!(
            "; shares are rounded to chunks, which costs up to {:.2} % of the rate",
            loss * 100.0
        ));
    }
    if steps > MAX_STEPS_RCCL {
        words.push_str(&format!("; RCCL takes {MAX_STEPS_RCCL} steps a thread block, and there are {steps}"));
    }
    if let Some(root) = plan.packing.collective.root() {
        words.push_str(&format!("; the format has no root: it is for calls with root {root} alone"));
    }
    note(&words);
    Ok(xml)
}

/// What to do where an algorithm would be too large.
fn smaller(arguments: &Arguments, plan: &Plan) -> &'static str {
    match plan.strategy {
        Strategy::Optimal | Strategy::ReduceScatterAllGather if arguments.trees_per_root.is_none() => {
            "; plan with fewer trees (--trees-per-root 1)"
        }
        Strategy::Optimal | Strategy::ReduceScatterAllGather => {
            "; take fewer ranks (--only), or fewer trees by another strategy (--strategy double-tree)"
        }
        _ => "; take fewer ranks (--only), or fewer trees (--strategy optimal --trees-per-root 1)",
    }
}

fn save(what: &str, path: &Path, text: &str) -> Result<(), CommandError> {
    std::fs::write(path, text).map_err(|error| {
        CommandError::usage(format!("{what} not written: {} ({error}); name another file", path.display()))
    })
}

/// What a person should know, beside the result.
pub(super) fn note(words: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().write_all(format!("note: {words}\n").as_bytes());
}
