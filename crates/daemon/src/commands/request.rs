//! [`request!`]: declares what a command is asked for with.

use crate::qmp::{Arguments, Failure};

/// Declares a request: each field with how it is taken out of the arguments, in this order. What is left
/// then is refused.
macro_rules! request {
    ($(#[$doc:meta])* $visible:vis $name:ident {
        $($(#[$of_field:meta])* $field:ident: $type:ty = $take:expr,)*
    }) => {
        $(#[$doc])*
        $visible struct $name {
            $($(#[$of_field])* $field: $type,)*
        }

        impl $name {
            $visible fn take(mut arguments: $crate::qmp::Arguments) -> Result<$name, $crate::qmp::Failure> {
                let request = $name {
                    $($field: $crate::commands::request::take(&mut arguments, $take)?,)*
                };
                arguments.finish().map(|()| request)
            }
        }
    };
}

pub(super) use request;

/// One field.
pub(super) fn take<T>(
    arguments: &mut Arguments,
    field: impl FnOnce(&mut Arguments) -> Result<T, Failure>,
) -> Result<T, Failure> {
    field(arguments)
}
