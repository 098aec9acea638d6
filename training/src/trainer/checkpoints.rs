//! Checkpoints of a trainer: all ranks come to rest, and each writes its state.
//!
//! A checkpoint is of the ranks that write it together ([`Kept`]): those of the trainer, or of more
//! trainers that are one training.
//!
//! **Invariants:** either all ranks have the checkpoint or none: they tell each other what failed,
//! and rank 0 gives it its name when all files are on the disk. A training whose checkpoint failed
//! goes on.

use std::path::{Path, PathBuf};

use pleach_collectives::Group;

use super::{CHECKPOINT, TrainError, Trainer};
use crate::checkpoint::{Checkpoint, CheckpointError, Manifest, RankFile, RankState, Writing};
use crate::interpreter::Vectors;
use crate::policy::{Event, Vector};

/// Longest text of an error that other ranks are told, in bytes.
const REASON_BYTES: usize = 512;

/// Hexadecimal digits of a SHA-256.
const DIGITS: usize = 64;

/// What is refused in a session.
const CHECKPOINTS: &str = "checkpoints";

/// What a checkpoint is of.
pub(crate) struct Kept {
    /// The ranks that write it.
    group: Group,
    /// The text of the scheme.
    scheme: String,
    layers: Vec<usize>,
}

impl Trainer {
    fn kept(&self) -> Kept {
        let layers = self.layout.layers().to_vec();
        Kept { group: self.group.clone(), scheme: self.name.clone(), layers }
    }

    /// The step that comes next, from 0; after the last one their number.
    #[must_use]
    pub fn next_step(&self) -> u64 {
        let next = self.interpreter.next_step();
        next.saturating_sub(u64::from(self.requested.is_some())).min(self.steps)
    }

    /// Saves a checkpoint to a folder, which all ranks share. All ranks call this before the same
    /// step, with vectors of the program by their names, as the velocity of its optimizer. Returns
    /// the checkpoint's own folder. The two newest checkpoints of a folder are kept.
    ///
    /// Reads and writes of ranks come to their end first, so ranks wait for each other here.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]: then no rank has the checkpoint, and the training may go on. Others end
    /// the training; see [`TrainError`].
    pub fn save(&mut self, folder: &Path, own: &[(&str, &[f32])]) -> Result<PathBuf, TrainError> {
        self.save_as(&self.kept(), folder, own)
    }

    pub(crate) fn save_as(
        &mut self,
        kept: &Kept,
        folder: &Path,
        own: &[(&str, &[f32])],
    ) -> Result<PathBuf, TrainError> {
        let step = self.pause()?;
        let saved = kept.write(folder, step, self.state(own));
        if let Err(error) = &saved
            && !matches!(error, TrainError::Checkpoint(_))
        {
            return saved;
        }
        self.resume()?;
        if let Ok(path) = &saved {
            self.checkpoint = Some(path.clone());
        }
        saved
    }

    /// This rank's state, as [`Trainer::save`] writes it, for a program that keeps it by itself.
    /// All ranks call this before the same step, and wait for each other here.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; others end the training, see [`TrainError`].
    pub fn rank_state(&mut self, own: &[(&str, &[f32])]) -> Result<RankState, TrainError> {
        self.pause()?;
        let state = self.kept().shared(self.state(own));
        self.resume()?;
        state
    }

    /// Goes on from the states of all ranks of a training of the same scheme, layout and number of
    /// ranks; each gives its own of [`Trainer::rank_state`]. All ranks call this before the first
    /// step, and in place of setting parameters. A rank that has none says why, as
    /// [`RankState::decode`] does: all ranks hear of it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]: then the trainer is of no use any more.
    pub fn restore_rank(&mut self, saved: Result<RankState, String>) -> Result<(), TrainError> {
        self.expect_group(CHECKPOINTS)?;
        let path = PathBuf::from("the state");
        let restored = saved.map_err(|reason| CheckpointError::Form { path, reason });
        let restored =
            restored.and_then(|saved| self.interpreter.restore(&saved, &mut self.vectors, &mut []));
        let (step, steps) = (self.interpreter.next_step(), self.steps);
        let restored = match restored {
            Ok(()) if step > steps => {
                Err(CheckpointError::Steps { path: PathBuf::from("the state"), step, steps })
            }
            restored => restored,
        };
        self.kept().shared(restored)?;
        self.begins_with = Event::Resume;
        self.compared.push(("the step of the state", step));
        Ok(())
    }

    /// Brings this rank to rest before the step that comes next, which is returned.
    fn pause(&mut self) -> Result<u64, TrainError> {
        self.expect_group(CHECKPOINTS)?;
        if self.began.is_none() {
            self.begin()?;
        }
        let step = self.requested.take().ok_or(CheckpointError::Ended)?;
        self.come_to_rest()?;
        Ok(step)
    }

    /// Goes on after [`Trainer::pause`], with all ranks.
    fn resume(&mut self) -> Result<(), TrainError> {
        self.open_lines()?;
        self.drive(Event::Resume, &mut |_, _| {})
    }

    /// Goes on from the newest checkpoint of a folder, which is of the same scheme, layout and
    /// number of ranks. All ranks call this before the first step, and in place of setting
    /// parameters. Returns the state of this rank, with the program's vectors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]: then the trainer is of no use any more, but after
    /// [`CheckpointError::World`], which [`Trainer::restore_parameters`] may follow.
    pub fn restore(&mut self, folder: &Path) -> Result<RankState, TrainError> {
        self.expect_group(CHECKPOINTS)?;
        self.restore_as(&self.kept(), folder)
    }

    pub(crate) fn restore_as(&mut self, kept: &Kept, folder: &Path) -> Result<RankState, TrainError> {
        let restored = self.try_restore(kept, folder);
        // Ranks of another world find that out alike.
        if matches!(restored, Err(CheckpointError::World { .. })) {
            return Ok(restored.map(|(_, saved)| saved)?);
        }
        let (checkpoint, saved) = kept.shared(restored)?;
        kept.compare(&checkpoint)?;
        self.begins_with = Event::Resume;
        self.is_from(&checkpoint);
        Ok(saved)
    }

    fn try_restore(
        &mut self,
        kept: &Kept,
        folder: &Path,
    ) -> Result<(Checkpoint, RankState), CheckpointError> {
        let checkpoint = Checkpoint::newest(folder)?;
        checkpoint.expect(Some(&kept.scheme), &kept.layers)?;
        let (path, theirs, own) = (checkpoint.path().to_owned(), checkpoint.ranks(), kept.group.world_size());
        if theirs != own {
            return Err(CheckpointError::World { path, theirs, own });
        }
        let (step, steps) = (checkpoint.manifest().step, self.steps);
        if step > steps {
            return Err(CheckpointError::Steps { path, step, steps });
        }
        let saved = checkpoint.rank(kept.group.rank())?;
        self.interpreter.restore(&saved, &mut self.vectors, &mut [])?;
        Ok((checkpoint, saved))
    }

    /// Begins with the mean parameters of all ranks of the newest checkpoint of a folder: by any
    /// scheme, on any number of ranks, from step 0. All ranks call this before the first step.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`].
    pub fn restore_parameters(&mut self, folder: &Path) -> Result<Checkpoint, TrainError> {
        self.expect_group(CHECKPOINTS)?;
        let kept = self.kept();
        let read = |checkpoint: &Checkpoint| {
            checkpoint.expect(None, &kept.layers)?;
            checkpoint.mean_parameters()
        };
        self.restore_parameters_as(&kept, folder, &read)
    }

    /// Begins with the parameters that `read` finds in the newest checkpoint of a folder.
    pub(crate) fn restore_parameters_as(
        &mut self,
        kept: &Kept,
        folder: &Path,
        read: &dyn Fn(&Checkpoint) -> Result<Vec<f32>, CheckpointError>,
    ) -> Result<Checkpoint, TrainError> {
        let found = Checkpoint::newest(folder);
        let found = found.and_then(|checkpoint| read(&checkpoint).map(|parameters| (checkpoint, parameters)));
        let (checkpoint, parameters) = kept.shared(found)?;
        kept.compare(&checkpoint)?;
        let [own] = self.vectors.pieces([Vector::Parameters], &(0..self.layout.parameters()));
        own.copy_from_slice(&parameters);
        self.is_from(&checkpoint);
        Ok(checkpoint)
    }

    fn is_from(&mut self, checkpoint: &Checkpoint) {
        let mark = self.compared.iter_mut().find(|(what, _)| *what == CHECKPOINT);
        mark.expect("each trainer compares it").1 = checkpoint.mark();
        self.checkpoint = Some(checkpoint.path().to_owned());
    }

    fn state(&mut self, own: &[(&str, &[f32])]) -> Result<RankState, CheckpointError> {
        let mut state = self.interpreter.save(&mut self.vectors, &mut [])?;
        own.iter().for_each(|(name, elements)| state.insert_own(name, elements));
        Ok(state)
    }
}

impl Kept {
    /// Of these ranks, the text of their scheme, and the layers of their model.
    pub(crate) fn new(group: &Group, scheme: String, layers: Vec<usize>) -> Self {
        Self { group: group.clone(), scheme, layers }
    }

    /// Checks that all ranks have read the same checkpoint.
    fn compare(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let mut marks = vec![0; self.group.world_size() as usize];
        self.group.all_gather(&[checkpoint.mark()][..], &mut marks[..])?;
        match (0..).zip(&marks).find(|(_, mark)| **mark != checkpoint.mark()) {
            None => Ok(()),
            Some((other, theirs)) => {
                let (own, theirs) = (checkpoint.mark().to_string(), theirs.to_string());
                Err(TrainError::Different { what: CHECKPOINT, rank: self.group.rank(), own, other, theirs })
            }
        }
    }

    /// A result of this rank, if all ranks have one.
    fn shared<T>(&self, own: Result<T, CheckpointError>) -> Result<T, TrainError> {
        let mut reason = own.as_ref().err().map_or_else(Vec::new, |error| error.to_string().into_bytes());
        reason.resize(REASON_BYTES, 0);
        let mut all = vec![0; REASON_BYTES * self.group.world_size() as usize];
        self.group.all_gather(&reason, &mut all)?;
        let own = own?;
        match (0..).zip(all.chunks_exact(REASON_BYTES)).find(|(_, reason)| reason[0] != 0) {
            None => Ok(own),
            Some((rank, reason)) => {
                let reason = String::from_utf8_lossy(reason).trim_end_matches('\0').to_owned();
                Err(CheckpointError::Peer { rank, reason }.into())
            }
        }
    }

    /// Writes a checkpoint of the states of all ranks.
    fn write(
        &self,
        folder: &Path,
        step: u64,
        own: Result<RankState, CheckpointError>,
    ) -> Result<PathBuf, TrainError> {
        let (rank, writing) = (self.group.rank(), Writing::new(folder, step));
        let begun = if rank == 0 { writing.begin() } else { Ok(()) };
        self.shared(begun)?;
        let file = own.and_then(|state| writing.rank(rank, &state));
        let completed = match self.files_of_all(file) {
            Ok(files) if rank == 0 => {
                writing.complete(&Manifest::new(self.scheme.clone(), self.layers.clone(), step, files))
            }
            Ok(_) => Ok(writing.path()),
            Err(TrainError::Checkpoint(error)) => Err(error),
            Err(error) => return Err(error),
        };
        let shared = self.shared(completed);
        if rank == 0 && shared.is_err() {
            writing.discard();
        }
        shared
    }

    /// The files of all ranks.
    fn files_of_all(&self, own: Result<RankFile, CheckpointError>) -> Result<Vec<RankFile>, TrainError> {
        let own = self.shared(own)?;
        let mut block = own.bytes.to_le_bytes().to_vec();
        block.extend_from_slice(own.sha256.as_bytes());
        let mut all = vec![0; block.len() * self.group.world_size() as usize];
        self.group.all_gather(&block, &mut all)?;
        let file = |block: &[u8]| {
            let (bytes, sha256) = block.split_at(block.len() - DIGITS);
            let bytes = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            RankFile { bytes, sha256: String::from_utf8_lossy(sha256).into_owned() }
        };
        Ok(all.chunks_exact(block.len()).map(file).collect())
    }
}
