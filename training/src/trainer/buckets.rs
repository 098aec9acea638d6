//! Steps bucket by bucket: averages travel while the program computes, backward and forward.
//!
//! In a training *by bucket* the trainer has the optimizer, and a step begins before the averages
//! of the one before are there. Its forward pass asks for the parameters of each bucket before it
//! uses them, and waits for that bucket alone. So the first layers, which are ready last, need not
//! hold up the rest.
//!
//! **Invariant:** no part of the gradient is written, and no bucket is ready, before the step has
//! the parameters of all buckets.

use std::ops::Range;

use super::{Event, PolicyError, Step, TrainError, Trainer, Vector, Work};
use crate::interpreter::{Interpreter, Vectors as _};
use crate::layout::Bucket;

impl Trainer {
    /// The same training by bucket. `optimizer` makes a step of some elements, which are named, by
    /// their gradient; it works element by element. It takes the place of the one that
    /// [`Step::update`] gets. Before the first step, and before [`Trainer::restore`].
    ///
    /// To save the optimizer's state with a checkpoint, ask for all parameters of the next step
    /// first ([`Step::vectors`]): then no step of the optimizer is outstanding.
    ///
    /// With `sync`, and a policy of the program's own that begins steps so, the passes of a step
    /// overlap the averages of the one before; see [`Step::parameters`]. Other schemes train as
    /// they do otherwise.
    ///
    /// ```
    /// # use pleach_collectives::{Group, Options};
    /// # use pleach_training::{Layout, Sgd, Trainer};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone()))?;
    /// let layout = Layout::of(&[3, 1]);
    /// let mut sgd = Sgd::new(layout.parameters(), 0.1, 0.9);
    /// let mut trainer = Trainer::new(&group, &"sync:bucket=4".parse()?, &layout, 20)?
    ///     .by_bucket(move |piece, parameters, gradient| sgd.step_piece(piece, parameters, gradient))?;
    /// while let Some(mut step) = trainer.step()? {
    ///     let buckets = step.buckets().len();
    ///     let mut loss = 0.0;
    ///     // The first layers are in the last buckets.
    ///     for bucket in (0..buckets).rev() {
    ///         loss += step.parameters(bucket)?.iter().map(|x| (x - 1.0).powi(2)).sum::<f32>();
    ///     }
    ///     for bucket in 0..buckets {
    ///         let piece = step.buckets()[bucket].clone();
    ///         let (parameters, gradient) = step.bucket(bucket)?;
    ///         gradient.iter_mut().zip(&parameters[piece]).for_each(|(g, x)| *g = 2.0 * (x - 1.0));
    ///         step.ready(bucket)?;
    ///     }
    ///     step.end(loss)?;
    /// }
    /// assert!(trainer.finish()?.parameters_equal);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The scheme does not train on so many ranks; a log cannot be made again.
    pub fn by_bucket(
        mut self,
        optimizer: impl FnMut(Range<usize>, &mut [f32], &[f32]) + Send + 'static,
    ) -> Result<Self, TrainError> {
        self.expect_group("steps bucket by bucket")?;
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        if let Some(scheme) = self.scheme {
            let plan = scheme.plan_by_bucket(&self.layout, rank, ranks)?;
            self.needed = vec![false; plan.buckets.len()];
            self.interpreter = Interpreter::new(plan, self.interpreter.agreement().is_hashed);
        }
        self.vectors.optimizer = Some(Box::new(optimizer));
        self.is_by_bucket = true;
        match self.log.take() {
            Some(log) => {
                // The old file is written to the end before the new one takes its place.
                let (folder, part_of) = log.place();
                drop(log);
                self.logged_as(&folder, part_of)
            }
            None => Ok(self),
        }
    }

    /// Waits until the step that was asked for has a bucket.
    fn need(&mut self, bucket: Bucket) -> Result<(), TrainError> {
        if !self.interpreter.is_by_bucket() {
            return Ok(());
        }
        if let Some(needed @ false) = self.needed.get_mut(bucket) {
            *needed = true;
            self.deliver(Event::Needed(bucket), &mut |_, _| {})?;
        }
        while !self.interpreter.is_supplied(bucket) {
            self.start_asked()?;
            let Some(started) = self.started.pop_front() else {
                return Err(PolicyError::Stuck { step: self.interpreter.next_step() }.into());
            };
            self.await_started(started, &mut |_, _| {})?;
        }
        self.start_asked()
    }

    /// Waits until the updates of all steps so far are made. In a training by bucket some of them
    /// come with the next step otherwise.
    ///
    /// # Errors
    ///
    /// See [`TrainError`].
    pub fn settle(&mut self) -> Result<(), TrainError> {
        if self.requested.is_some() { self.need_all() } else { Ok(()) }
    }

    /// Waits until the step that was asked for has all buckets.
    pub(crate) fn need_all(&mut self) -> Result<(), TrainError> {
        if self.interpreter.is_by_bucket() {
            let buckets = self.interpreter.buckets().len();
            (0..buckets).rev().try_for_each(|bucket| self.need(bucket))?;
        }
        Ok(())
    }

    /// Tells the policy of all-reduces that have ended, without waiting, so that others begin.
    pub(crate) fn hear_ended(&mut self) -> Result<(), TrainError> {
        while let Some(started) = self.started.pop_front_if(|started| match &mut started.work {
            Work::Average(pending) => pending.test(),
            Work::Total(pending) => pending.test(),
            // Its second half is a call that waits.
            Work::Parts(_) => false,
        }) {
            self.await_started(started, &mut |_, _| {})?;
            self.start_asked()?;
        }
        Ok(())
    }
}

impl Step<'_> {
    /// The parameters of a bucket. In a training by bucket it waits for that bucket alone, so a
    /// forward pass calls it before it uses the bucket: from the last bucket, which has the first
    /// layers, to the first.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Bucket`], if there is none; see [`TrainError`].
    pub fn parameters(&mut self, bucket: Bucket) -> Result<&[f32], TrainError> {
        let Some(piece) = self.buckets().get(bucket).cloned() else {
            return Err(PolicyError::Bucket { bucket, step: self.number }.into());
        };
        self.trainer.need(bucket)?;
        let [parameters] = self.trainer.vectors.pieces([Vector::Parameters], &piece);
        Ok(parameters)
    }

    /// As [`Step::update`], where the trainer has the optimizer ([`Trainer::by_bucket`]).
    ///
    /// # Errors
    ///
    /// Those of [`Step::update`].
    pub fn end(self, loss: f32) -> Result<(), TrainError> {
        self.update(|_, _| {}, loss)
    }
}
