//! [`Request`]: what a command is asked for with; [`request!`] declares one.

use crate::qmp::{Arguments, Failure};

/// What a command is asked for with, or a part of that.
pub(super) trait Request: Sized {
    /// Takes its own out of the arguments.
    fn read(arguments: &mut Arguments) -> Result<Self, Failure>;

    /// Takes all arguments, and refuses others.
    fn take(mut arguments: Arguments) -> Result<Self, Failure> {
        let request = Self::read(&mut arguments)?;
        arguments.finish().map(|()| request)
    }
}

/// Declares a request: each field with how it is taken out of the arguments, in this order.
macro_rules! request {
    ($(#[$doc:meta])* $visible:vis $name:ident {
        $($(#[$of_field:meta])* $field:ident: $type:ty = $take:expr,)*
    }) => {
        $(#[$doc])*
        $visible struct $name {
            $($(#[$of_field])* $field: $type,)*
        }

        impl $crate::commands::request::Request for $name {
            fn read(arguments: &mut $crate::qmp::Arguments) -> Result<$name, $crate::qmp::Failure> {
                use $crate::commands::request::field;
                Ok($name { $($field: field(arguments, $take)?,)* })
            }
        }
    };
}

pub(super) use request;

/// Takes one field.
pub(super) fn field<T>(
    arguments: &mut Arguments,
    take: impl FnOnce(&mut Arguments) -> Result<T, Failure>,
) -> Result<T, Failure> {
    take(arguments)
}
